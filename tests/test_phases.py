"""The phase clock moved by hand, and real steps that are held up in one phase after the other."""

import time

import pytest
import torch
from configs import tiny_train

from sparse2d.config import LookupMethod, ParallelismKind, Pipeline, ShardingKind
from sparse2d.data.dataset import open_dataset, train_batches
from sparse2d.engine import build_engine
from sparse2d.launch import run_ranks
from sparse2d.mesh import process_group
from sparse2d.parallel.tables import gather_tables, lookup_kernels
from sparse2d.phases import Phase, PhaseClock, watching
from sparse2d.pipeline import TrainSteps

CPU = torch.device("cpu")
HELD_UP_S = 0.6


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def test_every_moment_of_a_step_is_charged_to_the_innermost_phase():
    clock = Clock()
    phases = PhaseClock(clock=clock)
    for _ in range(2):
        with phases.step():
            clock.now += 1
            with phases.phase(Phase.output_distribution):
                clock.now += 2
                with phases.phase(Phase.lookup):
                    clock.now += 4
                clock.now += 8
            clock.now += 16
            phases.enter(Phase.dense_all_reduce)
            clock.now += 32
            phases.unwind()
            clock.now += 64
            phases.enter(Phase.averaging)
        clock.now += 1000
    expected = dict.fromkeys(Phase, 0.0) | {
        Phase.dense: 1 + 16 + 64,
        Phase.output_distribution: 2 + 8,
        Phase.lookup: 4,
        Phase.dense_all_reduce: 32,
    }
    assert phases.steps == [expected] * 2
    assert not phases.in_step


def hold_up(engine, steps) -> dict[Phase, list[bool]]:
    """Make one phase slow whenever its switch is on, before anything is watched."""
    switches = {phase: [False] for phase in Phase}

    def slow(phase: Phase) -> None:
        if switches[phase][0]:
            time.sleep(HELD_UP_S)

    def before(phase, call):
        return lambda *args, **kwargs: (slow(phase), call(*args, **kwargs))[1]

    steps.draw = before(Phase.data, steps.draw)
    engine.optimizer.step = before(Phase.optimizer, engine.optimizer.step)
    engine.averager.after_step = before(Phase.averaging, engine.averager.after_step)
    if "lookup" in engine.compressors:
        for sender in engine.compressors["lookup"]._senders:
            sender.selection.mask = before(Phase.compression, sender.selection.mask)
    # In the lookup's forward; its backward is the tables' update.
    for kernel in lookup_kernels(engine.model):
        kernel.emb_module.register_forward_pre_hook(lambda *_: slow(Phase.lookup))
    for name, module in engine.model.named_modules():
        if name.endswith("embedding_bag_collection"):
            module.input_dist = before(Phase.input_distribution, module.input_dist)
            for output_dist in module._output_dists:
                output_dist.register_forward_pre_hook(lambda *_: slow(Phase.output_distribution))
        if name.endswith("over_arch"):
            module.register_forward_pre_hook(lambda *_: slow(Phase.dense))
    return switches


def held_up_steps(config, dataset) -> dict[str, dict[str, float]]:
    """Seconds of each phase, of a step that is held up in the phase of that name."""
    torch.set_num_threads(1)
    with process_group(CPU) as rank:
        rows = open_dataset(dataset)
        engine = build_engine(config, rows, rank, CPU)
        batches = train_batches(rows, config.global_batch_size, rank.rank, rank.world_size)
        steps = TrainSteps(engine, batches, Pipeline.none)
        switches = hold_up(engine, steps)
        clock, held = PhaseClock(), {}
        with watching(engine, steps, clock):
            for number, (phase, switch) in enumerate(switches.items(), start=1):
                switch[0] = True
                with clock.step():
                    steps.train(number)
                switch[0] = False
                held[phase.name] = {name.name: seconds for name, seconds in clock.steps[-1].items()}
        return held


def watched_and_not(config, dataset) -> bool:
    """Whether watched steps leave the same tables and losses, bit for bit."""
    torch.set_num_threads(1)
    results = []
    with process_group(CPU) as rank:
        for watched in (False, True):
            rows = open_dataset(dataset)
            engine = build_engine(config, rows, rank, CPU)
            batches = train_batches(rows, config.global_batch_size, rank.rank, rank.world_size, max_steps=6)
            steps = TrainSteps(engine, batches, Pipeline.none)
            clock = PhaseClock()
            losses = []
            if watched:
                with watching(engine, steps, clock):
                    for step in range(1, 7):
                        with clock.step():
                            losses.append(steps.train(step)[0].item())
            else:
                losses = [steps.train(step)[0].item() for step in range(1, 7)]
            results.append((losses, gather_tables(engine.model, engine.table_shapes)))
    (losses, tables), (watched_losses, watched_tables) = results
    return losses == watched_losses and all(torch.equal(tables[name], watched_tables[name]) for name in tables)


@pytest.mark.parametrize(
    ("sharding", "method"),
    [(ShardingKind.table_wise, LookupMethod.none), (ShardingKind.row_wise, LookupMethod.dct)],
)
def test_what_holds_a_step_up_is_charged_to_its_phase(tmp_path, tiny_dataset, sharding, method):
    config = tiny_train(tmp_path, ParallelismKind.sparse_2d, num_ranks=4, num_groups=2, sharding=[sharding])
    config.compression.lookup.method = method
    held = run_ranks(held_up_steps, config, tiny_dataset, num_ranks=4)
    # The reduction of gradients and the tables' update have no place of their own where a test could hold them up.
    unheld = {"dense_all_reduce", "table_update"} | ({"compression"} if method is LookupMethod.none else set())
    for phase in set(held) - unheld:
        slow = {name for name, seconds in held[phase].items() if seconds >= HELD_UP_S}
        assert slow == {phase}
    for of_step in held.values():
        assert of_step["table_update"] > 0
        assert of_step["dense_all_reduce"] > 0
    assert run_ranks(watched_and_not, config, tiny_dataset, num_ranks=4)
