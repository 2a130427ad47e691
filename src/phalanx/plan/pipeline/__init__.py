"""Pipelines as data: who computes what in which order, whether that works, and how long it takes.

Torch-free.

The types, one walk of the data:

    ModelCosts ─► compute_model_part_costs ─► cut.cut_stages ─► Stages ─► predict_stage_costs ─►
    StageCosts
                                                                                             │
    name, ranks, microbatches ─► generate.generate_schedule ─┐                               ▼
    a CSV file ─► schedule.load_schedule_csv ────────────────────┴─► Schedule ─► simulate.simulate
                                                                    │        (spans, bubble)
                                        (problems, one line each) check.find_schedule_problems

1. `Action(kind, stage, microbatch)` is one piece of work, written 3F0: stage 3 forwards microbatch
   0. Kinds are F (forward), B (whole backward), or its halves I (gradient of the input, which the
   stage before waits for) and W (gradient of the weights, which nobody waits for, so that it can
   fill what would be a bubble).
2. `Schedule` says which rank holds which stage, and what each rank does in which order. When is not
   said: an action begins once its rank is free and its input is there
   (`simulate.simulate_schedule`), which is all that `check` and `simulate` know of running one.
   Sends and receives are not listed; they follow from the actions.
3. Named schedules come from `generate`, in the order in which torch's own classes run them; a
   schedule of one's own comes from a CSV file in the format that torch's pipeline runtime reads.
   Both go through `check`.
4. `Stages` says which blocks a stage has. The first stage has the embedding as well, the last one
   the head.
5. `Timeline` is the schedule with begin and end of every action, from `simulate` or measured
   (`trace` makes it of spans, and stage costs of it): `report.pipeline` draws either.
   `closed_forms` are what the literature says of uniform stages; tests hold the simulation against
   them.
"""
