"""A device without the SDK, written from docs/reference/wire-format.md and protos/ only; runs FedAvg and FedDKC.

    python examples/minimal_client.py 127.0.0.1:50051 out/device-0 own.npz

The run's model is `digits_linear`. own.npz has the arrays inputs, [N, 1, 8, 8] float32, and labels, [N] int64.
"""

import hashlib
import importlib
import secrets
import sys
import tempfile
import time
from pathlib import Path

import google_crc32c
import grpc
import numpy as np
import torch
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from grpc_tools import protoc
from torch import nn

PROTOS = Path(__file__).resolve().parents[1] / "protos"
TYPES = [np.dtype(name) for name in ("V", "<f4", "<f2", "<f8", "<i4", "<i8", "u1", "?", "i1")]  # ElementType
RETRIED = ("", "internal", "not-ready", "too-many", "no-space", "incomplete", "out-of-step", "checksum")

with tempfile.TemporaryDirectory() as made:  # the modules that protoc generates, in place of the SDK's
    files = [str(path) for path in PROTOS.rglob("*.proto")]
    assert protoc.main(["", f"-I{PROTOS}", f"--python_out={made}", f"--grpc_python_out={made}", *files]) == 0
    for package in ("fleetdistill", "fleetdistill/wire", "fleetdistill/wire/v1"):
        (Path(made) / package / "__init__.py").touch()
    sys.path.insert(0, made)
    service, stubs = (importlib.import_module(f"fleetdistill.wire.v1.service_pb2{end}") for end in ("", "_grpc"))


def tensors_in(message):
    """Yields the tensors of a message with their sizes in bytes, in field order, depth first."""
    for field, value in message.ListFields():
        for item in (value if field.is_repeated else [value]) if field.message_type else []:
            if field.message_type.name == "Tensor":
                yield item, TYPES[item.element_type].itemsize * int(np.prod(item.shape))
            else:
                yield from tensors_in(item)


class Device:
    def __init__(self, server, folder, inputs, labels):
        self.stub, self.answer = stubs.DeviceServiceStub(grpc.insecure_channel(server)), folder / "answer.bin"
        self.x, self.y = torch.from_numpy(inputs), torch.from_numpy(labels)
        self.model, stages = nn.Sequential(), nn.Sequential()
        stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.model.stages, stages.stem, stages.flatten, stages.head = stages, stem, nn.Flatten(), nn.Linear(128, 10)
        folder.mkdir(parents=True, exist_ok=True)
        if not (path := folder / "identity.bin").exists():
            path.write_bytes(service.Identity(device=folder.name, secret=secrets.token_bytes(32)).SerializeToString())
        self.identity = service.Identity.FromString(path.read_bytes())

    def call(self, make, failures=0):
        """Repeats a call until the server accepts it; raises RuntimeError if it never will."""
        try:
            return make()
        except grpc.RpcError as error:
            status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()
            code = info.reason if status and status.details[0].Unpack(info) else ""
            if code not in RETRIED and (code, "check_in" in info.metadata) != ("bad-identity", True):
                raise RuntimeError(f"{code}: {error.details()}") from error
        time.sleep(float(info.metadata.get("after_seconds", min(2**failures / 4, 15) * (1 + torch.rand(())))))
        if code == "bad-identity":
            self.check_in()
        return self.call(make, failures + 1)

    def check_in(self):
        request = service.CheckInRequest(identity=self.identity)
        self.contract = contract = self.call(lambda: self.stub.CheckIn(request, timeout=30)).contract
        self.config = {item.name: getattr(item, item.WhichOneof("value") or "text") for item in contract.config.entries}
        profile, request.profile.samples, request.profile.classes = request.profile, len(self.y), 10
        profile.model_fingerprint = contract.model_fingerprint  # `load` checks that the model is the run's
        profile.extractor_fingerprint = contract.extractor_fingerprint
        profile.input_shape.extend([1, 8, 8])
        profile.features.add(name="cut", shape=[8, 4, 4])
        profile.knowledge_types.extend([1, 2])  # float32, float16
        profile.allowed_columns.extend(["features", "labels", "logits", "parameters"])
        self.call(lambda: self.stub.CheckIn(request, timeout=30))
        self.identity.run = contract.run

    def download(self, sha256):
        """Returns the parts of a payload by name, with their data."""
        request = service.DownloadRequest(identity=self.identity, sha256=sha256)
        first, *rest = self.call(lambda: list(self.stub.Download(request, timeout=600)))
        assert all(google_crc32c.value(item.chunk.data) == item.chunk.crc32c for item in rest)
        data, parts = b"".join(item.chunk.data for item in rest), first.header.parts
        assert hashlib.sha256(parts.SerializeToString(deterministic=True) + data).digest() == sha256
        for tensor, size in tensors_in(parts):
            tensor.data, data = data[:size], data[size:]
        return {part.name: getattr(part, part.WhichOneof("kind")) for part in parts.parts}

    def messages(self, header, data):
        yield service.UploadRequest(header=header)
        for at in range(header.first_byte, len(data), 1 << 20):
            piece = data[at : at + (1 << 20)]
            chunk = {"offset": at, "data": piece, "crc32c": google_crc32c.value(piece)}
            yield service.UploadRequest(chunk=chunk)

    def upload(self, header):
        """Sends an answer, whose tensors have their data, until it has a receipt or its ask is closed."""
        payload, data = header.payload, b"".join(tensor.data for tensor, _ in tensors_in(header.payload))
        for tensor, _ in tensors_in(payload):
            tensor.ClearField("data")
        digest = hashlib.sha256(payload.parts.SerializeToString(deterministic=True) + data)
        payload.data_bytes, payload.sha256 = len(data), digest.digest()

        def attempt():
            status = self.stub.UploadStatus(service.UploadStatusRequest(identity=self.identity, name=header.name))
            if status.HasField("receipt") or not status.ask_open:
                return status.receipt.id or status.closed_text
            header.first_byte = status.next_byte
            return self.stub.Upload(self.messages(header, data), timeout=600).receipt.id

        print(f"round {header.name.round}: {self.call(attempt)}", flush=True)
        self.answer.unlink()

    def handle(self, ask):
        if ask.step not in ("train", "deliver"):
            request = service.DeclineRequest(identity=self.identity, round=ask.round, step_number=ask.step_number)
            return self.call(lambda: self.stub.Decline(request, timeout=30))
        torch.manual_seed(ask.seed)
        header = service.UploadHeader(identity=self.identity, samples=len(self.y))
        header.name.round, header.name.step_number = ask.round, ask.step_number
        header.name.payload, header.name.attempt = ask.payload, ask.first_attempt
        step = {"fedavg": self.fedavg, "feddkc": self.feddkc}[self.contract.method]
        step(ask.step, self.download(ask.payload), header.payload.parts.parts)
        return self.answer.write_bytes(header.SerializeToString())  # with its data, for a restarted device

    def fill(self, tensor, array):
        tensor.element_type, tensor.encoding, tensor.data = TYPES.index(array.dtype), 1, array.tobytes()  # ENCODING_RAW
        tensor.shape.extend(array.shape)

    def array_of(self, tensor):
        return torch.from_numpy(np.frombuffer(tensor.data, TYPES[tensor.element_type]).reshape(tensor.shape).copy())

    def load(self, weights):
        module = self.model if weights.scope == "model" else self.model.stages[:1]
        named = [*weights.parameters, *weights.buffers]
        module.load_state_dict({item.name: self.array_of(item.tensor) for item in named})

    def fedavg(self, step, received, answer):
        self.load(received["parameters"])
        if step == "train":
            self.train(torch.zeros(len(self.y), 10))
            sent, trained = answer.add(name="parameters").model_parameters, dict(self.model.named_parameters())
            sent.scope = "model"
            for name, value in self.model.state_dict().items():
                self.fill((sent.parameters if name in trained else sent.buffers).add(name=name).tensor, value.numpy())

    def feddkc(self, step, received, answer):
        known, teacher, tau = received["knowledge"], torch.zeros(len(self.y), 10), self.config["temperature"]
        if known.valid:
            teacher[self.array_of(known.sample_ids)] = (self.array_of(known.values).float() / tau).softmax(1)
        self.train(teacher)
        floats, sent = TYPES[self.contract.knowledge_type], answer.add(name="knowledge").sample_knowledge
        self.fill(sent.sample_ids, np.arange(len(self.y)))
        features = self.model.eval().stages[:1](self.x).detach().numpy()
        self.fill(sent.features.add(name="cut").tensor, features.astype(floats))
        self.fill(sent.logits, self.model(self.x).detach().numpy().astype(floats))
        self.fill(sent.labels, self.y.numpy().astype(np.int32))

    def train(self, teacher):
        """Trains on the labels and towards the rows of `teacher` that are not zero (FedDKC's eq. 1)."""
        config, tau = self.config, self.config.get("temperature", 1.0)
        rates = {name: config[name] for name in ("momentum", "nesterov", "weight_decay")}
        optimizer = torch.optim.SGD(self.model.train().parameters(), config["learning_rate"], **rates)
        for _ in range(config["local_epochs"]):
            self.call(lambda: self.stub.Heartbeat(service.HeartbeatRequest(identity=self.identity), timeout=30))
            for rows in torch.randperm(len(self.y)).split(config["batch_size"]):
                logits = self.model(self.x[rows])
                distance = nn.functional.kl_div((logits / tau).log_softmax(1), teacher[rows], reduction="batchmean")
                loss = nn.functional.cross_entropy(logits, self.y[rows]) + config.get("beta", 0) * tau**2 * distance
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def run(self):
        self.check_in()
        if self.contract.initial_weights:
            self.load(self.download(self.contract.initial_weights)["initial"])
        request = service.NextAskRequest(identity=self.identity, wait_seconds=20)
        while not (result := self.call(lambda: self.stub.NextAsk(request, timeout=50))).HasField("finished"):
            if result.HasField("ask") and not self.answer.exists():
                self.handle(result.ask)
            if self.answer.exists():
                self.upload(service.UploadHeader.FromString(self.answer.read_bytes()))
            time.sleep(torch.empty(()).uniform_(result.come_back.after_seconds, result.come_back.before_seconds).item())


Device(sys.argv[1], Path(sys.argv[2]), **np.load(sys.argv[3])).run()
