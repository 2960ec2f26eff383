"""Small talk in which a name and a number are told early and asked for at the end: half a point for each."""

import random

NAMES = "Ada Ben Carla Dmitri Elena Farid Grace Hugo Ines Jonas Karim Lena Marco Nora Omar Priya".split()
TALK = (
    "I baked bread with my neighbour this morning, and the whole street smelled of it until noon.",
    "My brother painted his old bicycle green last week, and now he rides it to work every day.",
    "It has rained here since Monday, so the children play chess in the kitchen all afternoon.",
    "There is a new bookshop by the river, and they let you read on the sofa as long as you like.",
    "The garden is full of tomatoes this year, and I give a basket of them to everyone I meet.",
    "Our dog has learned to open the fridge, and nobody in the family knows how to stop him.",
    "I watched the stars from the roof yesterday, and I counted seven of them before I fell asleep.",
    "The train was late again this evening, but a woman played the violin on the platform for us.",
    "I am learning to swim at the moment, and the teacher says that I move like a tired frog.",
    "My grandmother called me today, and she told me the story of the lost umbrella once more.",
    "We walked up the hill before breakfast, and the fog below us looked like a big white lake.",
    "Someone left a piano in our hallway, and since then the cat walks over the keys at night.",
)
QUESTION = "What is my name, and what is my number?"
TURNS = 10


class Talk:
    """A name and a number, eight turns of small talk, and a question. The row's seed chooses all but the question."""

    def reset(self, *, seed=None, options=None):
        rng = random.Random((options or {}).get("seed", seed))
        self.name, self.number = rng.choice(NAMES), str(rng.randrange(100, 1000))
        told = f"I am {self.name}, and my number is {self.number}. Please remember both."
        self.says = [told, *rng.sample(TALK, TURNS - 2), QUESTION]
        return "", {}

    def step(self, action):
        if self.says:
            return self.says.pop(0), 0.0, False, False, {}
        return "", 0.5 * (self.name in action) + 0.5 * (self.number in action), True, False, {}
