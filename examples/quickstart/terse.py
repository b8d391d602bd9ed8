"""A reward of one's own for the quickstart: the right number, and nothing around it."""

from arctic_core.rl.tasks import TaskItem, last_number


def right_and_short(completion: str, item: TaskItem) -> float:
    """1 for the right last number, less 0.02 for every character too many."""
    if last_number(completion) != item.answer:
        return 0.0
    return max(0.1, 1.0 - 0.02 * (len(completion.strip()) - len(item.answer)))
