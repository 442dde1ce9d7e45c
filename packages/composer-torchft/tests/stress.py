"""Kill three replica groups at random, and measure how long the others pause: `python stress.py [KILLS] [RANKS]`.

Not a test of the suite. A group is killed in whatever it does, also while it returns, as long as another one trains,
and started again at once. It prints the number of kills, the pause from a kill to the next batch that was trained
without the dead group, the time that the run lost per kill, groups that gave up by themselves, and the largest
difference of a weight at the end. With two or more RANKS in a group, a random one is killed.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
import time
from typing import Any

from replica_groups import Groups, lighthouse

NUMBER, PER_RUN, BATCHES = 3, 10, 900


def attack(groups: Groups, kills: int) -> tuple[list[tuple[float, int]], int]:
    """Kill groups until the run is nearly over; return when which one was killed, and how many had given up."""
    killed: list[tuple[float, int]] = []
    started, gave_up = dict.fromkeys(range(NUMBER), time.time()), 0
    while len(killed) < kills and max(_last(groups, each)[1] for each in range(NUMBER)) < BATCHES - 50:
        time.sleep(random.uniform(0.5, 5))
        for group in groups.failed():
            gave_up += 1
            groups.end(group)
            groups.start(group)
            started[group] = time.time()
        victim = random.randrange(NUMBER)
        training = {each for each in range(NUMBER) if _last(groups, each)[0] > max(started[each], time.time() - 2)}
        if training - {victim}:
            in_the_run = victim in training
            groups.kill(victim, random.randrange(groups.ranks))
            killed.append((time.time(), victim if in_the_run else -1))
            groups.start(victim)
            started[victim] = time.time()
    groups.wait(600, restarts=True)
    return killed, gave_up


def _last(groups: Groups, group: int) -> list[Any]:
    return next(iter(groups.diary(group)[-1:]), [0.0, 0])


def pauses(groups: Groups, killed: list[tuple[float, int]]) -> list[float]:
    """Return the seconds from each kill of a training group to the next batch whose exchange began after it."""
    found = []
    for at, victim in killed:
        later = [
            [line[0] - at for line in groups.diary(each) if line[0] > at] for each in range(NUMBER) if each != victim
        ]
        # The batch that was running may have been averaged before the kill, so the second one counts.
        found += [min(times[1] for times in later if len(times) > 1)] if victim >= 0 else []
    return found


def time_lost(groups: Groups) -> float:
    """Return the seconds by which the batches of the whole run took longer than the median batch."""
    ends: dict[int, float] = {}
    for group in range(NUMBER):
        for at, batch, *_ in groups.diary(group):
            ends[batch] = min(at, ends.get(batch, at))
    times = [ends[batch] for batch in sorted(ends)]
    durations = [after - before for before, after in itertools.pairwise(times)]
    return sum(durations) - len(durations) * statistics.median(durations)


def main(kills: int, ranks: int) -> None:
    total, measured, gave_up, difference, lost = 0, [], 0, 0.0, 0.0
    while total < kills:
        with lighthouse() as address, tempfile.TemporaryDirectory() as folder:
            groups = Groups(
                NUMBER, address, ranks, folder=folder, batch=12, duration=f"{BATCHES}ba", seconds=0.05, timeout=20.0
            )
            while min(_last(groups, each)[1] for each in range(NUMBER)) < 3:
                time.sleep(0.1)
            killed, failed = attack(groups, min(PER_RUN, kills - total))
            total, gave_up = total + len(killed), gave_up + failed
            measured += pauses(groups, killed)
            lost += time_lost(groups)
            clocks: dict[int, set[float]] = {}
            for group in range(NUMBER):
                for _, batch, _, samples in groups.diary(group):
                    clocks.setdefault(batch, set()).add(samples)
            assert sorted(clocks) == [*range(1, BATCHES + 1)], "a step is missing"
            assert all(len(samples) == 1 for samples in clocks.values()), "the clocks of groups differ"
            weights = [groups.weights(each) for each in range(NUMBER)]
            for name, tensor in weights[0].items():
                difference = max(difference, *(float((tensor - each[name]).abs().max()) for each in weights))
        print(
            f"{total} kills, {len(measured)} of a training group: pause median {statistics.median(measured):.2f} s, "
            f"worst {max(measured):.2f} s; {lost / total:.2f} s lost per kill; {gave_up} gave up; largest difference "
            f"of a weight {difference:g}",
            flush=True,
        )


if __name__ == "__main__":
    kills, ranks = map(int, [*sys.argv[1:], *("100", "1")[len(sys.argv) - 1 :]])
    main(kills, ranks)
