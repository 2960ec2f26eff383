"""A judge for tests that answers by a function."""

from onetrunk.judges.judge import Judge, Pair, Rating, Verdict


class ToldJudge(Judge):
    """Answers by `answer(item, principle)`: a number, None (an abstention), a text (an error) or an answer.

    `asked` are the items with the text of their principle, in the order asked.
    """

    def __init__(self, answer, name="told", identity=None):
        self.answer, self.name, self.identity = answer, name, {"judge": identity or name}
        self.asked = []

    def _answer(self, items, principle, keep):
        for index, item in enumerate(items):
            self.asked.append((principle.text, item))
            answer, kind = self.answer(item, principle), Verdict if isinstance(item, Pair) else Rating
            if isinstance(answer, str):
                answer = kind(None, error=answer)
            keep(index, answer if isinstance(answer, (Verdict, Rating)) else kind(answer))
