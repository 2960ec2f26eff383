"""The rubric of smollm2-135m-cpu: plain functions with TRL's signature, each from 0 to 1."""

import re

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

SUBJECT = re.compile(r"(?:about|describe) (.+?)(?: in (?:one|a single) sentence)?[.?]$", re.IGNORECASE)
MOST_WORDS = 20
ANALYZER = SentimentIntensityAnalyzer()


def _texts(completions):
    return [completion[0]["content"].strip() for completion in completions]


def warm(completions, **kwargs):
    """VADER's compound score, a sum over a lexicon of sentiment (Hutto and Gilbert, 2014), moved from [-1, 1]."""
    return [(ANALYZER.polarity_scores(text)["compound"] + 1) / 2 for text in _texts(completions)]


def one_sentence(completions, completion_stopped=None, **kwargs):
    """1 for one whole sentence of at most 20 words that ends by itself."""
    texts = _texts(completions)
    ended = completion_stopped or [True] * len(texts)
    whole = [re.search(r"[.!?]", text) and not re.search(r"[.!?]\s+\S", text) for text in texts]
    return [
        float(bool(is_whole and stopped) and len(text.split()) <= MOST_WORDS)
        for text, is_whole, stopped in zip(texts, whole, ended, strict=True)
    ]


def on_subject(prompts, completions, **kwargs):
    """1 for a reply with the last word of the subject, singular or plural; None for a request without one."""
    found = [SUBJECT.search(prompt[-1]["content"]) for prompt in prompts]
    stems = [match and match[1].split()[-1].lower().rstrip("s")[:6] for match in found]
    return [
        None if stem is None else float(stem in text.lower())
        for stem, text in zip(stems, _texts(completions), strict=True)
    ]
