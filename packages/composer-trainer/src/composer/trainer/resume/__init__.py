"""Resume a run exactly: its position in the data, random generators, schedules and calls of `fit`.

What happens in a launch, in this order:

1. The constructor chooses a checkpoint: `autoresume.choose_checkpoint` finds the newest one of the run, or takes
   `load_path`.
2. `composer.checkpoint.run.load_checkpoint` reads it: `RunProgress.before_load` sets the states of schedulers aside,
   `State.load_state_dict` loads the state, and `RunProgress.after_load` stores the entry `resumption`.
3. Each `fit` is counted by `RunProgress.begin_fit`. A call that had ended in the run that saved is skipped once its
   arguments are set; `restore_if_complete` restores the end of the last one.
4. In the call that is resumed, `RunProgress.apply` restores schedulers, gradient scaler and evaluation metrics.
   Arguments that the user has changed take precedence.
5. The loop restores generators and the position in the data with `LoaderPosition.begin`. In an epoch that is in
   progress, `resume` returns to the position; `start` begins any other epoch.
6. `RunProgress.complete` saves the end of a call in its last checkpoint.
"""
