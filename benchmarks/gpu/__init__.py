"""What a GPU does for the engine, the learner and the weight store, measured by one command.

    make gpu-check                                # in the project's environment
    python -m benchmarks.gpu                      # where only torch and transformers are installed
    python -m benchmarks.gpu --gpus 4             # instead: ranks of the learner on 4 GPUs over NCCL
    python -m benchmarks.gpu --device cpu         # a tiny model on a CPU: tests the command itself

It needs no Kafka, no Beam and no network: the model has random weights in the shape of Qwen2.5-1.5B (0.5B on a GPU with
less memory). It ends within `--minutes`, prints one table and writes all figures to a JSON file. Every part runs in a
process of its own, so one that fails, hangs or runs out of memory costs no other part its figures.
"""
