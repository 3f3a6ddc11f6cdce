"""A text game learned while it is played: JitRL, without training.

    python examples/jitrl_text_game.py

The player sees a text and is offered commands by a model that does not know the way; here that is a
function, `propose`. Memory alone makes the score rise from episode to episode.
"""

from statistics import mean

from qurl.rollout.jitrl import JitRL, Options

ROOMS = {
    "hall": ("A cold hall. Stairs lead up, a door leads east.", {"up": "attic", "east": "kitchen"}),
    "attic": ("A dusty attic full of boxes.", {"down": "hall"}),
    "kitchen": ("A kitchen with a chest.", {"west": "hall", "south": "garden"}),
    "garden": ("A wild garden behind the house.", {"north": "kitchen"}),
}
IDLE = ("look", "sing")
LONGEST = 12


def propose(state, history):
    """Every command that the text allows, and idling most likely of all."""
    commands = state.rpartition("You can: ")[2].rstrip(".").split(", ")
    weights = {command: 3.0 if command in IDLE else 1.0 for command in commands}
    return {command: weight / sum(weights.values()) for command, weight in weights.items()}


def play(agent):
    """One episode; returns its score: 5 for the key, 10 for opening the chest with it."""
    room, has_key, steps = "hall", False, []
    while len(steps) < LONGEST:
        text, exits = ROOMS[room]
        extra = ["take key"] if room == "attic" and not has_key else []
        extra += ["open chest"] if room == "kitchen" else []
        carries = "You carry a key." if has_key else "You carry nothing."
        state = f"{text} {carries} You can: {', '.join([*exits, *extra, *IDLE])}."
        command = agent.act(state, [action for _, action, _ in steps]).action
        is_won = command == "open chest" and has_key
        steps.append((state, command, 10.0 * is_won + 5.0 * (command == "take key")))
        has_key = has_key or command == "take key"
        room = exits.get(command, room)
        if is_won:
            break
    agent.learn(steps)
    return sum(reward for _, _, reward in steps)


def main(episodes=40, seeds=3):
    """Mean score of the first and of the last ten episodes."""
    arms = {
        "proposal alone": {"beta": 1e-9},
        "jitrl": {"beta": 4.0},
        "released code": {"is_official": True},
    }
    for name, options in arms.items():
        runs = []
        for seed in range(seeds):
            agent = JitRL(propose, Options(gamma=0.8, threshold=0.75, seed=seed, **options))
            runs.append([play(agent) for _ in range(episodes)])
        first = mean(mean(run[:10]) for run in runs)
        last = mean(mean(run[-10:]) for run in runs)
        print(f"{name:16} first {first:5.2f}   last {last:5.2f}")


if __name__ == "__main__":
    main()
