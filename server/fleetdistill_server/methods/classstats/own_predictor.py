"""The server's own predictor in class statistics with an averaged extractor: trained on drawn rows alone."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.averaged_config import AveragedConfig
from fleetdistill.methods.classstats.gaussians import draw_classes, length
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.seeds import derive_seed
from fleetdistill.training.local_training import extract, train_steps
from fleetdistill.training.losses import soft_targets
from fleetdistill.training.rollback import train_or_roll_back
from fleetdistill_server.methods.classstats.merge import Classes
from fleetdistill_server.methods.cohort import Notes
from fleetdistill_server.methods.context import MethodContext


class OwnPredictor:
    """The server's own predictor: draws rows of the merged classes and learns from them alone.

    Args:
        network: The predictor, features to logits.
        config: Settings of the method.
        context: Where to compute, and the first weights of the predictor.
        feature_shape: Shape of one row of features.
        nonnegative: Whether features are never below 0.
    """

    def __init__(
        self,
        network: nn.Module,
        config: AveragedConfig,
        context: MethodContext,
        feature_shape: tuple[int, ...],
        *,
        nonnegative: bool,
    ) -> None:
        self.network = network
        self.config = config
        self.context = context
        self.nonnegative = nonnegative
        self._feature_shape = feature_shape

    def soft_predictions(self, classes: Classes, seed: int) -> Array:
        """The server's own predictor on the rows that devices draw: of classes in the merge alone."""
        rows, _ = self.draw(classes, seed)
        return soft_targets(extract(self.network, rows), self.config.temperature).numpy()

    def untrainable(self, classes: Classes, notes: Notes) -> list[int]:
        """Trains the server's own predictor; where that fails, the class whose rows are longest is at fault."""
        # From the first weights again: of who is not in the merge any more nothing may stay.
        self.network.load_state_dict(self.context.server_model(self._feature_shape).state_dict())
        if not classes:
            return []
        train = partial(self._train, classes, notes.generator("predictor").initial_seed())
        failure = train_or_roll_back(train, self.network, rate=("learning_rate", self.config.learning_rate))
        if not failure:
            return []
        longest = max(classes, key=lambda label: length(classes[label]))
        text = (
            f"class {longest}: the server's own predictor cannot learn from rows drawn of the classes, and this one's "
        )
        notes.event("class-left-out", f"{text}are the longest; it is left out. {failure}")
        return [longest]

    def unrecognised(self, classes: Classes, least: float, notes: Notes) -> list[int]:
        """Guard: a class whose drawn rows the server's own predictor takes for others is not worth learning from."""
        if not classes:
            return []
        found = self.recognition(classes, notes.generator("recognition").initial_seed())
        notes.report("recognition", {str(label): rate for label, rate in found.items()})
        poor = [label for label, rate in found.items() if rate < least and self.config.recognition_guard]
        for label in poor:
            text = f"the server recognises {found[label]:.3f} of the rows drawn for class {label}"
            remedy = "if its predictor has not learned enough, raise server_epochs"
            notes.guard("recognition", f"{text}, {least:.3f} is the least; the class is left out; {remedy}")
        return poor

    def _train(self, classes: Classes, seed: int) -> None:
        """3.9: cross-entropy on drawn rows alone, new ones in every epoch."""
        optimizer = make_local_optimizer(self.config, self.network.parameters())
        for epoch in range(self.config.server_epochs):
            rows, labels = self.draw(classes, derive_seed(seed, epoch))
            train_steps(
                self.network,
                len(labels),
                epochs=1,
                batch_size=self.config.batch_size,
                optimizer=optimizer,
                losses=partial(self._losses, rows, labels),
                generator=torch.Generator().manual_seed(derive_seed(seed, epoch, "order")),
                device=self.context.torch_device,
            )

    def _losses(self, rows: Tensor, labels: Tensor, epoch: int, rows_b: Tensor) -> list[Tensor]:
        return [functional.cross_entropy(self.network(rows[rows_b]), labels[rows_b])]

    def recognition(self, classes: Classes, seed: int) -> dict[int, float]:
        """Share of each class's drawn rows that the server's predictor gives this class."""
        rows, labels = self.draw(classes, seed)
        right = extract(self.network, rows).argmax(dim=1) == labels.cpu()
        return {label: float(right[labels.cpu() == label].double().mean()) for label in classes}

    def draw(self, classes: Classes, seed: int) -> tuple[Tensor, Tensor]:
        rows, labels = draw_classes(classes, self.config.drawn_rows, seed, nonnegative=self.nonnegative)
        where = self.context.torch_device
        return torch.from_numpy(rows).reshape(-1, *self._feature_shape).to(where), torch.from_numpy(labels).to(where)


def least_recognised(classes: int) -> float:
    """Share of a class's drawn rows that has to be recognised: twice chance.

    Of two classes that would be every row; there it is half way from chance to that. One class has no other to be
    taken for.
    """
    return {1: 0.0, 2: 0.75}.get(classes, 2 / classes)
