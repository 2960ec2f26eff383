"""The report on a causal judge of one's own, on a tiny one."""

from onetrunk.judges.local import CausalJudge
from onetrunk.models.build import train_tokenizer
from tests.judges.injections import ATTACKS, GOOD, PRINCIPLE, PROMPT, defended_messages
from tests.judges.model_report import HEAD, PLAIN, report
from tests.judges.trained_judge import CHATML, MARKS
from tests.tiny import tiny_model


def test_a_model_is_asked_with_the_template_and_without():
    (message,) = defended_messages(PLAIN[0], PRINCIPLE)
    tokenizer = train_tokenizer([message["content"]] * 2, 400, MARKS)
    tokenizer.chat_template = CHATML
    model = tiny_model("llama", vocab_size=512, max_position_embeddings=2048)
    judge = CausalJudge(model, tokenizer, name="tiny", min_label_mass=0.0)
    head, line, template, headings = report(judge, ATTACKS[:2]).splitlines()
    assert head.count("|") == line.count("|") == template.count("|") == headings.count("|") == len(HEAD) + 1
    assert (
        template.startswith("| template | 0.") and template.endswith("of 2 |") and headings.startswith("| headings |")
    )
    assert PROMPT in message["content"] and GOOD in message["content"]
