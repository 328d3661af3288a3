"""Whole rounds of every method, worked out apart: plain loops over weights, written from the papers' equations.

Both halves run for two or three rounds; then every weight is held against that of a reference, which shares with them
only the seeds and the optimisers of torch. Temperatures, weights, epochs and batches are none that could hide a
factor, and devices have different numbers of rows.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from fleetdistill.methods.base import DeviceMethod, Local
from fleetdistill.methods.cdkt.config import CDKTConfig
from fleetdistill.methods.cdkt.device import CDKTDevice
from fleetdistill.methods.dafkd.config import DaFKDConfig
from fleetdistill.methods.dafkd.device import DaFKDDevice
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.methods.fedd2s.config import FedD2SConfig
from fleetdistill.methods.fedd2s.device import FedD2SDevice
from fleetdistill.methods.feddkc.config import FedDKCConfig
from fleetdistill.methods.feddkc.device import FedDKCDevice
from fleetdistill.methods.feddkd.config import FedDKDConfig
from fleetdistill.methods.feddkd.device import FedDKDDevice
from fleetdistill.seeds import derive_seed
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import SplitModel, check_local_model
from fleetdistill.training.portable_noise import portable_noise
from fleetdistill_server import testing
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods.base import MethodContext, ServerMethod
from fleetdistill_server.methods.cdkt import CDKTServer
from fleetdistill_server.methods.dafkd.server import DaFKDServer
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.methods.fedd2s.server import FedD2SServer
from fleetdistill_server.methods.feddkc.server import FedDKCServer
from fleetdistill_server.methods.feddkd import FedDKDServer

CLASSES, INPUTS, CUT, HIDDEN = 3, 6, 5, 4
SEED = 1
ROWS = {"a": 10, "b": 13}
CPU = torch.device("cpu")
TAU = 2.0
SGD: dict[str, Any] = {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def small_model(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    stages = {
        "stem": nn.Sequential(nn.Linear(INPUTS, CUT), nn.ReLU()),
        "body": nn.Sequential(nn.Linear(CUT, HIDDEN), nn.ReLU()),
        "head": nn.Linear(HIDDEN, classes),
    }
    return SplitModel(stages, cut="stem")


def small_extractor(input_shape: Sequence[int]) -> nn.Module:
    return small_model().extractor


def small_predictor(feature_shape: Sequence[int], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(CUT, 7), nn.Tanh(), nn.Linear(7, classes))


def make_context(**more: Any) -> MethodContext:
    here = "test_two_rounds"
    sys.modules[here] = sys.modules[__name__]
    models = ModelSection(
        device=f"{here}:small_model", extractor=f"{here}:small_extractor", server=f"{here}:small_predictor"
    )
    given: dict[str, Any] = {"classes": CLASSES, "input_shape": (INPUTS,), "models": models}
    return MethodContext(**{**given, "torch_device": CPU, "seed": 3, "knowledge_type": "float32", **more})


def data_of(device: str) -> TensorData:
    rows, generator = ROWS[device], torch.Generator().manual_seed(ord(device))
    labels = (torch.arange(rows) * 2 + ord(device)) % CLASSES
    return TensorData(torch.randn(rows, INPUTS, generator=generator) + 0.5 * labels[:, None], labels)


def local_of(device: str, model: nn.Module, **more: Any) -> Local:
    taps = check_local_model(model, torch.zeros(2, INPUTS), CLASSES)
    return Local(model=model, taps=taps, data=data_of(device), classes=CLASSES, torch_device=CPU, **more)


def new_model(seed: int) -> SplitModel:
    torch.manual_seed(seed)
    return small_model()


def play(server: ServerMethod, members: Mapping[str, DeviceMethod], rounds: int = 2) -> None:
    for cohort in testing.play(server, members, rounds, seed=SEED):
        assert cohort.events == []


def ask_seed(round_number: int, step: str, device: str, nth: int = 1) -> int:
    """Seed of a device's answer to the nth step of a round."""
    return derive_seed(SEED, round_number, step, nth, device)


def server_seed(round_number: int, name: str) -> int:
    """Seed of the server's random numbers for one purpose."""
    return derive_seed(SEED, round_number, name, "server")


def assert_same_weights(found: nn.Module, expected: nn.Module, tolerance: float = 2e-6) -> None:
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert_close(one, other, atol=tolerance, rtol=1e-4)


def batches(count: int, size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).split(size)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def kl(target_bc: Tensor, logits_bc: Tensor, tau: float = TAU) -> Tensor:
    """tau^2 * mean over rows of the sum over classes of t * ln(t / s)."""
    log_s_bc = logits_bc / tau - (logits_bc / tau).exp().sum(1, keepdim=True).log()
    return tau**2 * (target_bc * (target_bc.clamp_min(1e-30).log() - log_s_bc)).sum(1).mean()


def soft(logits: Tensor, tau: float = TAU) -> Tensor:
    return (logits.detach() / tau).exp() / (logits.detach() / tau).exp().sum(1, keepdim=True)


def sgd(module: nn.Module, **changes: Any) -> torch.optim.SGD:
    how = {**SGD, **changes}
    return torch.optim.SGD(module.parameters(), lr=how.pop("learning_rate"), **how)


def weighted_mean(modules: Sequence[nn.Module], weights: Sequence[float]) -> nn.Module:
    mean = copy.deepcopy(modules[0])
    states = [module.state_dict() for module in modules]
    for name, tensor in mean.state_dict().items():
        if tensor.is_floating_point():
            total = sum(weight * state[name].double() for weight, state in zip(weights, states, strict=True))
            tensor.copy_(total / sum(weights))
    return mean


def train_on_labels(model: nn.Module, device: str, optimizer: Any, epochs: int, size: int, seed: int) -> None:
    data = data_of(device)
    for rows in batches(len(data), size, epochs, seed):
        step(optimizer, functional.cross_entropy(model(data.inputs[rows]), data.labels[rows]))


def test_fedavg() -> None:
    """Local training with a fresh optimiser each round, then the mean by samples."""
    config = FedAvgConfig(local_epochs=2, batch_size=4, **SGD)
    server = FedAvgServer(config, make_context())
    members = {name: FedAvgDevice(config, local_of(name, new_model(9))) for name in ROWS}
    expected: nn.Module = copy.deepcopy(server.model)
    for number in (1, 2):
        trained = [copy.deepcopy(expected) for _ in ROWS]
        for model, name in zip(trained, ROWS, strict=True):
            train_on_labels(model, name, sgd(model), 2, 4, ask_seed(number, "train", name))
        expected = weighted_mean(trained, list(ROWS.values()))
    play(server, members)
    assert_same_weights(server.model, expected)


def affine_refinement(logits: Tensor, peak: float) -> Tensor:
    """KKR where no class falls below 0: u + s (v - u), s = (C T - 1) / (C v_m - 1)."""
    v = logits.double().softmax(1)
    stretch = (CLASSES * peak - 1) / (CLASSES * v.max(1, keepdim=True).values - 1)
    refined = 1 / CLASSES + stretch * (v - 1 / CLASSES)
    assert bool((refined >= 0).all())
    return refined.float()


def test_feddkc() -> None:
    """Both optimisers go on from round to round; the server's logits of one round teach in the next."""
    shared: dict[str, Any] = {
        "batch_size": 4,
        "temperature": TAU,
        "beta": 0.7,
        "server_beta": 0.6,
        "server_learning_rate": 0.08,
    }
    config = FedDKCConfig(
        refinement="kkr",
        target_peak=0.36,
        local_epochs=2,
        server_epochs=2,
        teacher_guard=False,
        **shared,
        **SGD,
    ).for_classes(CLASSES)
    server = FedDKCServer(config, make_context())
    members = {name: FedDKCDevice(config, local_of(name, new_model(ord(name)))) for name in ROWS}
    models = {name: copy.deepcopy(half.local.model) for name, half in members.items()}
    predictor = copy.deepcopy(server.predictor)
    optimizers = {name: sgd(model) for name, model in models.items()}
    of_server, teachers = sgd(predictor, learning_rate=0.08), dict[str, Tensor]()
    for number in (1, 2, 3):
        uploads = []
        for name, model in models.items():
            data = data_of(name)
            for rows in batches(len(data), 4, 2, ask_seed(number, "train", name)):
                logits = model(data.inputs[rows])
                loss = functional.cross_entropy(logits, data.labels[rows])
                if number > 1:
                    loss = loss + 0.7 * kl(soft(teachers[name][rows]), logits)
                step(optimizers[name], loss)
            features = model.features(data.inputs).detach()  # type: ignore[operator]
            uploads.append((features, affine_refinement(model(data.inputs).detach(), 0.36), data.labels))
        features, targets, labels = (torch.cat(column) for column in zip(*uploads, strict=True))
        for rows in batches(len(labels), 4, 2, server_seed(number, "distil")):
            logits = predictor(features[rows])
            step(of_server, functional.cross_entropy(logits, labels[rows]) + 0.6 * kl(targets[rows], logits))
        teachers = {name: predictor(one[0]).detach() for name, one in zip(models, uploads, strict=True)}
    play(server, members, rounds=3)
    assert_same_weights(server.predictor, predictor)
    for name, half in members.items():
        assert_same_weights(half.local.model, models[name])


def test_feddkd() -> None:
    """Rates fall from round 1 on, also before `dkd_start_round`; teachers are those of the round."""
    config = FedDKDConfig(
        local_epochs=2,
        batch_size=4,
        learning_rate_round_decay=0.5,
        dkd_steps=2,
        dkd_lr=0.4,
        dkd_lr_round_decay=0.5,
        dkd_lr_step_decay=0.7,
        dkd_batch_size=6,
        dkd_start_round=2,
        temperature=TAU,
        **SGD,
    )
    server = FedDKDServer(config, make_context())
    members = {name: FedDKDDevice(config, local_of(name, new_model(9))) for name in ROWS}
    expected: nn.Module = copy.deepcopy(server.model)
    for number in (1, 2, 3):
        locals_ = {name: copy.deepcopy(expected) for name in ROWS}
        for name, model in locals_.items():
            rate = 0.05 * 0.5 ** (number - 1)
            train_on_labels(model, name, sgd(model, learning_rate=rate), 2, 4, ask_seed(number, "train", name))
        expected = weighted_mean(list(locals_.values()), list(ROWS.values()))
        for nth in (1, 2) if number > 1 else ():
            gradients = []
            for name, teacher in locals_.items():
                generator = torch.Generator().manual_seed(ask_seed(number, "distil", name, nth + 1))
                x = data_of(name).inputs[torch.randperm(ROWS[name], generator=generator)[:6]]
                loss = kl(soft(teacher(x)), expected(x))
                gradients.append(torch.autograd.grad(loss, list(expected.parameters())))
            gamma = 0.4 * 0.5 ** (number - 1) * 0.7 ** (nth - 1)
            with torch.no_grad():
                for parameter, *of_devices in zip(expected.parameters(), *gradients, strict=True):
                    parameter -= gamma * sum(of_devices) / 2
    play(server, members, rounds=3)
    assert_same_weights(server.model, expected)


def proxy_set() -> TensorData:
    generator = torch.Generator().manual_seed(77)
    return TensorData(torch.randn(11, INPUTS, generator=generator), torch.arange(11) % CLASSES)


def endless(count: int, size: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).split(size)


def with_labels(outcomes: Tensor, labels: Tensor) -> Tensor:
    return (outcomes + torch.eye(CLASSES)[labels]) / 2


def test_cdkt() -> None:
    """Outcomes and embeddings, KL on both sides; devices go round the proxy set, batch after batch."""
    config = CDKTConfig(
        knowledge="repfull",
        local_epochs=2,
        batch_size=4,
        alpha=0.4,
        beta=0.3,
        temperature=TAU,
        global_epochs=2,
        min_server_steps=1,
        server_learning_rate=0.07,
        teacher_guard=False,
        **SGD,
    )
    proxy = proxy_set()
    server = CDKTServer(config, make_context(proxy=proxy, models=ModelSection(server="test_two_rounds:small_model")))
    members = {name: CDKTDevice(config, local_of(name, new_model(ord(name)), proxy=proxy)) for name in ROWS}
    models = {name: copy.deepcopy(half.local.model) for name, half in members.items()}
    world = copy.deepcopy(server.model)
    for number in (1, 2):
        z_s, h_s = soft(world(proxy.inputs)), soft(world.embedding(proxy.inputs))  # type: ignore[operator]
        for name, model in models.items():
            data, optimizer = data_of(name), sgd(model)
            seed = ask_seed(number, "train", name)
            shown = endless(len(proxy), 4, derive_seed(seed, "proxy"))
            for rows in batches(len(data), 4, 2, seed):
                loss = functional.cross_entropy(model(data.inputs[rows]), data.labels[rows])
                if number > 1:
                    of = next(shown)
                    outcomes = kl(with_labels(z_s, proxy.labels)[of], model(proxy.inputs[of]))
                    loss = loss + 0.4 * (outcomes + kl(h_s[of], model.embedding(proxy.inputs[of])))  # type: ignore[operator]
                step(optimizer, loss)
        z_bar = with_labels(sum(soft(model(proxy.inputs)) for model in models.values()) / 2, proxy.labels)  # type: ignore[arg-type]
        h_bar = soft(sum(model.embedding(proxy.inputs).detach() for model in models.values()) / 2)  # type: ignore[arg-type, operator]
        optimizer = sgd(world, learning_rate=0.07)
        for of in batches(len(proxy), 4, 2, server_seed(number, "transfer")):
            logits, embeddings = world(proxy.inputs[of]), world.embedding(proxy.inputs[of])  # type: ignore[operator]
            loss = functional.cross_entropy(logits, proxy.labels[of])
            step(optimizer, loss + 0.3 * (kl(z_bar[of], logits) + kl(h_bar[of], embeddings)))
    play(server, members)
    assert_same_weights(server.model, world)
    for name, half in members.items():
        assert_same_weights(half.local.model, models[name])


def test_fedd2s() -> None:
    """Z_0 = 1: layer 3, then 2. The device's Adam goes on, the copies' starts afresh; J then Q for each batch."""
    config = FedD2SConfig(
        local_epochs=4,
        batch_size=4,
        learning_rate=0.003,
        drop_every=1,
        l_min=1,
        temperature=TAU,
        steps="alternating",
        warmup_epochs=1,
        teacher_guard=False,
    ).for_classes(CLASSES)
    server = FedD2SServer(config, make_context())
    members = {name: FedD2SDevice(config, local_of(name, new_model(9))) for name in ROWS}
    models = {name: copy.deepcopy(half.local.model) for name, half in members.items()}
    adam = lambda module: torch.optim.Adam(module.parameters(), lr=0.003)  # noqa: E731
    optimizers, world = {name: adam(model) for name, model in models.items()}, copy.deepcopy(server.network)
    for number, layer in ((1, 3), (2, 2)):
        copies, firsts = [], {}
        for name, model in models.items():
            data = data_of(name)
            if number == 1:
                train_on_labels(model, name, optimizers[name], 1, 4, ask_seed(1, "extract", name))
            firsts[name] = model.stages[:1](data.inputs).detach()  # type: ignore[index, operator]
            p = soft(world[layer - 1 :](model.stages[:layer](data.inputs)))  # type: ignore[index, operator]
            own = copy.deepcopy(world)
            optimizer = adam(own)
            for rows in batches(len(data), 4, 2, server_seed(number, f"clients to server {name}")):
                step(optimizer, kl(p[rows], own(firsts[name][rows])))
                step(optimizer, functional.cross_entropy(own(firsts[name][rows]), data.labels[rows]))
            copies.append(own)
        world = weighted_mean(copies, [1, 1])  # type: ignore[assignment]
        for name, model in models.items():
            data, t = data_of(name), soft(world(firsts[name]))
            for rows in batches(len(data), 4, 2, ask_seed(number, "learn", name, nth=2)):
                below = model.stages[:layer](data.inputs[rows])  # type: ignore[index, operator]
                step(optimizers[name], kl(t[rows], world[layer - 1 :](below)))
                step(optimizers[name], functional.cross_entropy(model(data.inputs[rows]), data.labels[rows]))
    play(server, members)
    assert_same_weights(server.network, world, tolerance=2e-5)
    for name, half in members.items():
        assert_same_weights(half.local.model, models[name], tolerance=2e-5)


def test_dafkd() -> None:
    """Classifier and discriminator in one step, then the generator on fresh noise; the ensemble teaches the mean."""
    config = DaFKDConfig.from_settings(
        {
            "local_epochs": 2,
            "batch_size": 4,
            "optimizer": "sgd",
            "generator": "digits_generator",
            "noise_dim": 3,
            "lambda_adv": 0.8,
            "generator_lr": 0.002,
            "discriminator_lr": 0.003,
            "kd_samples": 9,
            "kd_epochs": 2,
            "kd_lr": 0.03,
            "temperature": TAU,
            "kd_start_round": 1,
            "maturity_guard": False,
            **SGD,
        }
    ).for_classes(CLASSES)
    server = DaFKDServer(config, make_context())
    members = {name: DaFKDDevice(config, local_of(name, new_model(9))) for name in ROWS}
    judges, own = dict[str, nn.Module](), dict[str, torch.optim.Optimizer]()
    for name, half in members.items():
        judges[name] = copy.deepcopy(half.ready()[0].discriminator)
        own[name] = torch.optim.Adam(judges[name].parameters(), lr=0.003)
    world, maker = copy.deepcopy(server.model), copy.deepcopy(server.generator)
    for number in (1, 2):
        trained, makers = [], []
        for name, judge in judges.items():
            model, generator = copy.deepcopy(world), copy.deepcopy(maker).train()
            seed = ask_seed(number, "train", name)
            _train_adversarially(name, model, judge, own[name], generator, seed)  # type: ignore[arg-type]
            trained.append(model)
            makers.append(generator)
        maker, world = weighted_mean(makers, [1, 1]), weighted_mean(trained, [1, 1])  # type: ignore[assignment]
        noise = torch.from_numpy(portable_noise(server_seed(number, "noise"), 9, 3))
        samples = maker.eval()(noise).detach()
        f = torch.stack(
            [judge(model.embedding(samples)).sigmoid() for judge, model in zip(judges.values(), trained, strict=True)]  # type: ignore[operator]
        )
        share = (f / f.sum(0)).detach()
        teacher = sum(weight[:, None] * soft(model(samples)) for weight, model in zip(share, trained, strict=True))
        optimizer = sgd(world, learning_rate=0.03)
        for rows in batches(9, 4, 2, server_seed(number, "distil")):
            step(optimizer, kl(teacher[rows], world(samples[rows])))
    play(server, members)
    assert_same_weights(server.model, world, tolerance=1e-5)
    for module in (server.generator, maker):
        nn.init.zeros_(module.get_parameter("body.0.bias"))  # batch-norm takes it out: its gradient is rounding alone
    assert_same_weights(server.generator, maker, tolerance=1e-5)


def _train_adversarially(
    name: str, model: SplitModel, judge: nn.Module, of_judge: torch.optim.Optimizer, maker: nn.Module, seed: int
) -> None:
    """Eqs. (9) and (3), each on noise of its own."""
    data, optimizer = data_of(name), sgd(model)
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.002)
    random = torch.Generator().manual_seed(derive_seed(seed, "noise"))
    drawn: Callable[[int], Tensor] = lambda count: maker(torch.randn(max(count, 2), 3, generator=random))  # noqa: E731
    for rows in batches(len(data), 4, 2, seed):
        x, fake = data.inputs[rows], drawn(len(rows)).detach()
        real_logit, fake_logit = judge(model.embedding(x)), judge(model.embedding(fake))
        against = (1 + (-real_logit).exp()).log().sum() + (1 + fake_logit.exp()).log().sum()
        optimizer.zero_grad()
        of_judge.zero_grad()
        loss = functional.cross_entropy(model(x), data.labels[rows]) + 0.8 * against / (len(x) + len(fake))
        loss.backward()
        optimizer.step()
        of_judge.step()
        step(of_maker, (1 + (-judge(model.embedding(drawn(len(rows))))).exp()).log().mean())
