"""Instrumenting other people's training loops; each module needs the package that it is named after.

    transformers   instrument(trainer, slots=..., slot_of="slot", writer="runs/mine")
    trl            the same for GRPOTrainer, whose rows are shuffled between generation and loss
    accelerate     step(accelerator, scope, optimizer) in a loop of one's own
    verl           instrument(engine, slots=..., slot_of="agent") for the FSDP engine of a training worker

Nothing is imported here, so that none of these packages has to be installed for the others.
"""
