"""The best step of a run so far: RUN/best.json names it, once its checkpoint is there."""

from __future__ import annotations

from phalanx.checkpoint.best import BEST_FILE_NAME, read_best_step, record_best_step
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.core.errors import CheckpointError
from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import CheckpointFailed
from phalanx.train.evaluation import EvalScore, EvaluationHistory


class BestCheckpointRecorder:
    """Records the best step of a run, on rank 0. Does nothing without `storage`.

    Once another job has the run, nothing is recorded: the ranks stop at their next step.
    """

    def __init__(self, job: Job, mesh: Mesh, bus: Bus, storage: RunStorage | None) -> None:
        self._job, self._mesh, self._bus, self._storage = job, mesh, bus, storage

    def record_best_if_missing(self, evals: EvaluationHistory, step: int) -> None:
        """Record the step that training continues from, if it was the best and its job ended after
        the checkpoint was there and before it was recorded."""
        if (
            self._storage is None
            or not self._job.eval.keep_best
            or not evals.has_evaluation_of_step(step)
        ):
            return
        score = evals.get_score_of_step(step)
        best_step, _ = evals.best(score.num_targets, self._job.eval.mode or "min")
        recorded = read_best_step(self._storage.run_dir)
        if best_step == step and (recorded is None or recorded.step != step):
            self.record_best(step, score)

    def record_best(self, step: int, score: EvalScore) -> None:
        """Record in RUN/best.json that `step`, whose checkpoint is there, is the best.

        A failure is an event.
        """
        # Looked at now: a write into another job's run cannot be taken back.
        if self._storage is None or self._mesh.rank != 0 or self._storage.is_lost(now=True):
            return
        metric = self._job.eval.metric
        try:
            record_best_step(
                self._storage.run_dir,
                step=step,
                loss=score.loss,
                num_targets=score.num_targets,
                metric=metric,
                value=score.value,
                checkpoint=self._build_external_checkpoint_url(self._storage, step),
            )
        except CheckpointError as error:
            self._bus.emit(
                CheckpointFailed(step, BEST_FILE_NAME, str(error), training_goes_on=True)
            )
        except OSError as error:
            self._bus.emit(
                CheckpointFailed(
                    step, BEST_FILE_NAME, error.strerror or str(error), training_goes_on=True
                )
            )

    def _build_external_checkpoint_url(self, storage: RunStorage, step: int) -> str | None:
        """The URL of the checkpoint of a step, if that is not in the run's own directory."""
        if self._job.checkpoint.url is None:
            return None
        folders = storage.store.folders()
        return next((folder.url for folder in folders if folder.step == step), None)
