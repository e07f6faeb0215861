"""TorchRec's pipeline changes the order of the work and not a bit of the result."""

from configs import tiny_train
from ranks import train_through

from sparse2d.config import DenseOptimizer, ParallelismKind, Pipeline, SyncRows, TableOptimizer
from sparse2d.launch import run_ranks

ADAGRAD = {"optimizer": TableOptimizer.rowwise_adagrad, "dense": DenseOptimizer.adam}


def test_pipelined_steps_and_evaluations_between_them_give_the_same_bits(tmp_path, tiny_dataset):
    """Train 3, evaluate, train 3, evaluate, then to the end: the rows that were drawn ahead are trained on, once."""
    configs = [
        tiny_train(tmp_path, num_ranks=4, **ADAGRAD),
        tiny_train(tmp_path, ParallelismKind.sparse_2d, num_ranks=4, num_groups=2, interval=2, **ADAGRAD),
    ]
    configs[1].sync.rows = SyncRows.touched
    for config in configs:
        plain, pipelined = run_ranks(
            train_through, config, tiny_dataset, [Pipeline.none, Pipeline.sparse_dist], 3, num_ranks=4
        )
        assert len(plain.losses) == len(pipelined.losses) == 1200 // 60
        assert plain == pipelined


def test_upstreams_pipeline_does_not_average_by_itself(tmp_path, tiny_dataset):
    """With K beyond the run's end replicas must differ, and so each group's loss."""
    config = tiny_train(tmp_path, ParallelismKind.sparse_2d, num_ranks=2, num_groups=2, interval=1000, **ADAGRAD)
    plain, pipelined = run_ranks(
        train_through, config, tiny_dataset, [Pipeline.none, Pipeline.sparse_dist], 3, num_ranks=2
    )
    assert plain == pipelined
