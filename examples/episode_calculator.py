r"""An episode of your own: the model writes a sum, a calculator appends the result.

    python examples/episode_calculator.py
    qurl train recipes/arithmetic-cpu.toml --run-dir runs/calculator --sampling.stop = \
        --rollout.episode examples.episode_calculator:calculator \
        --task.reward examples.episode_calculator:last_number

The first line plays one episode by hand; the second trains with it.
"""

import re


def calculator(problem, tokenizer):
    """Turns end at `=`, and the tool appends the sum; a turn with another end is the last."""
    [equals] = tokenizer("=").input_ids
    tokens = [*problem.prompt_ids]
    while True:
        turn = yield tokens
        tokens += turn.token_ids
        if turn.token_ids[-1] != equals:
            return
        terms = re.findall(r"\d+", turn.text.rpartition(";")[2])
        tokens += tokenizer(f"{sum(map(int, terms))};").input_ids


def last_number(text, answer, extra):
    return float(re.findall(r"\d+", text)[-1:] == [answer])


if __name__ == "__main__":
    from qurl.tasks import load_task
    from qurl.tasks.tokenizer import build_tokenizer
    from qurl.types import Completion

    tokenizer = build_tokenizer()
    episode = calculator(load_task("arithmetic", tokenizer=tokenizer)[0], tokenizer)
    print("the model gets ", tokenizer.decode(next(episode)))
    turn = Completion(tokenizer("3+8=").input_ids, [0.0] * 4, "3+8", "stop")
    print("and after 3+8= ", tokenizer.decode(episode.send(turn)))
