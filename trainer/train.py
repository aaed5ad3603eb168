"""Trains one small GPT for a fixed time on one device and measures bits per byte on text it has not seen. The one file an experiment edits.

    python train.py        in a folder with the trainer's other files; the budget is TIME_BUDGET in prepare.py

Everything worth changing is a constant below; None means the preset of the device (PRESETS) or of the data. One GPU per run, or the CPU.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # must be set before torch starts

import torch
import torch.nn as nn
import torch.nn.functional as F
from attention import attend, prepare
from device import LossReader, choose_device, facts, held_by_others_gib, peak_memory_mib
from ending import compiler_fault, exhausts, one_sentence, out_of_memory
from feed import batches
from peaks import peak_flops
from prepare import EVALUATOR, TIME_BUDGET, Dataset, evaluate_bpb, load_dataset
from report import UNCOUNTED_STEPS, BudgetClock, Report
from settings import BadSetting, Plan, announcement, make_plan
from state import CHECKPOINT_FILE, STATE_FILE, load, save

# --- what an experiment changes ---------------------------------------------------------------------------------------

SEED = 42

# Model
DEPTH = None  # layers
ASPECT_RATIO = 64  # width = DEPTH * ASPECT_RATIO, rounded up to a multiple of HEAD_DIM
HEAD_DIM = None
SEQ_LEN = None  # tokens in a training row; None: the row length of the evaluation
VALUE_EMBEDDINGS = True  # every second layer mixes a learned embedding of its tokens into its values (ResFormer)
SOFTCAP = 15.0  # logits are squashed into ±SOFTCAP

# Batch
TOTAL_BATCH_SIZE = None  # tokens per optimizer step
DEVICE_BATCH_SIZE = None  # rows per forward pass; None: as many as fit the preset and divide TOTAL_BATCH_SIZE

# Optimization
OPTIMIZER = "muon"  # of the matrices: "muon" or "adamw"; embeddings, head and scalars always use AdamW
MATRIX_LR = 0.04  # Muon
ADAMW_MATRIX_LR = 0.003  # matrices under OPTIMIZER = "adamw"
EMBEDDING_LR = 0.6  # this and the next are for width 768 and grow with width**-0.5
UNEMBEDDING_LR = 0.004
SCALAR_LR = 0.5  # per-layer residual weights
WEIGHT_DECAY = 0.2  # cautious, of the matrices, falling to 0 over the budget
ADAM_BETAS = (0.8, 0.95)
WARMUP_RATIO = 0.0  # shares of the budget
WARMDOWN_RATIO = 0.5
FINAL_LR_FRAC = 0.0

# How it runs; reported as attributes, and never the reason why two runs cannot be compared
COMPILE = None  # "none", "optimizer", "model", "both"
ATTENTION = None  # "default", or a name of attention.py: "cudnn", "flash", "efficient", "math", "flex", "fa4", "fa3", "fa2"
LOSS = None  # "torch", or "fused": one Triton kernel (CUDA)
CHECKPOINT_EVERY_S = 600  # seconds of training between states an interrupted run can go on from

# CPU: width 128 and 2 layers are the best of the sizes tried at 20 s on 2 cores; twice the width or depth is worse (docs/benchmarks.md).
# CUDA: 2**17 tokens was the best batch for budgets of 1 to 2 minutes on an H200, flat from 2**16 to 2**18 and clearly worse at 2**19.
PRESETS = {
    "cpu": {
        "DEPTH": 2,
        "HEAD_DIM": 32,
        "TOTAL_BATCH_SIZE": 2**11,
        "DEVICE_TOKENS": 2**11,
        "COMPILE": "none",
        "ATTENTION": "default",
        "LOSS": "torch",
    },
    "cuda": {
        "DEPTH": 8,
        "HEAD_DIM": 128,
        "TOTAL_BATCH_SIZE": 2**17,
        "DEVICE_TOKENS": 2**17,
        "COMPILE": "both",
        "ATTENTION": "default",
        "LOSS": "fused",
    },
}


# --- model ------------------------------------------------------------------------------------------------------------


@dataclass
class GPTConfig:
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    value_embeddings: bool
    softcap: float


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x [B, T, H, D]; cos and sin are [1, T, 1, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


class Linear(nn.Linear):
    """A linear layer without bias whose float32 weight computes in the type of its input."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    GATE_CHANNELS = 32

    def __init__(self, config: GPTConfig, has_values: bool, backend: str) -> None:
        super().__init__()
        self.n_head, self.backend = config.n_head, backend
        self.q, self.k, self.v, self.out = (Linear(config.n_embd, config.n_embd) for _ in range(4))
        self.gate = Linear(min(self.GATE_CHANNELS, config.n_embd), config.n_head) if has_values else None

    def forward(self, x: torch.Tensor, values: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (layer(x).view(B, T, self.n_head, -1) for layer in (self.q, self.k, self.v))
        if self.gate is not None and values is not None:
            gate = 2 * torch.sigmoid(self.gate(x[..., : self.gate.in_features]))  # [B, T, H]; 1 at the start
            v = v + gate.unsqueeze(-1) * values.view(B, T, self.n_head, -1)
        q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))
        return self.out(attend(q, k, v, self.backend).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up, self.down = Linear(config.n_embd, 4 * config.n_embd), Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig, has_values: bool, backend: str) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(config, has_values, backend), MLP(config)

    def forward(self, x: torch.Tensor, values: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(norm(x), values, cos, sin)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Weights are float32; activations are bfloat16 on a GPU and float32 on a CPU."""

    ROTARY_BASE = 10000.0
    EVAL_ROW_MOST = 2048  # the evaluation may use longer rows than training

    def __init__(self, config: GPTConfig, backend: str = "default", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        with_values = [config.value_embeddings and (config.n_layer - 1 - i) % 2 == 0 for i in range(config.n_layer)]
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd, dtype=dtype)
        self.blocks = nn.ModuleList(Block(config, has, backend) for has in with_values)
        self.values = nn.ModuleDict(
            {str(i): nn.Embedding(config.vocab_size, config.n_embd, dtype=dtype) for i, has in enumerate(with_values) if has}
        )
        self.head = Linear(config.n_embd, config.vocab_size)
        self.residual = nn.Parameter(torch.ones(config.n_layer))  # weight of the stream before each block
        self.skip = nn.Parameter(torch.full((config.n_layer,), 0.1))  # weight of the embedding, added before each block
        half = config.n_embd // config.n_head // 2
        positions = torch.arange(max(config.sequence_len, self.EVAL_ROW_MOST))
        angles = torch.outer(positions, self.ROTARY_BASE ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos().to(dtype)[None, :, None, :], persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype)[None, :, None, :], persistent=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        bound = (3 / self.config.n_embd) ** 0.5  # uniform of this bound has standard deviation width**-0.5
        nn.init.normal_(self.embedding.weight)
        nn.init.normal_(self.head.weight, std=0.001)
        for table in self.values.values():
            nn.init.uniform_(table.weight, -bound, bound)
        for block in self.blocks:
            for layer in (block.attention.q, block.attention.k, block.attention.v, block.mlp.up):
                nn.init.uniform_(layer.weight, -bound, bound)
            for layer in (block.attention.out, block.mlp.down, block.attention.gate):
                if layer is not None:
                    nn.init.zeros_(layer.weight)  # every block starts as the identity

    def trunk(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids [B, T] to normalised activations [B, T, C]."""
        cos, sin = self.cos[:, : idx.size(1)], self.sin[:, : idx.size(1)]
        x0 = x = norm(self.embedding(idx))
        residual, skip = self.residual.to(x.dtype), self.skip.to(x.dtype)
        for i, block in enumerate(self.blocks):
            values = self.values[str(i)](idx) if str(i) in self.values else None
            x = block(residual[i] * x + skip[i] * x0, values, cos, sin)
        return norm(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Activations [..., C] to float32 logits [..., V] inside ±softcap."""
        cap = self.config.softcap
        return cap * torch.tanh(self.head(x).float() / cap)

    def token_nats(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of every token in nats, [B, T]."""
        logits = self.logits(self.trunk(idx))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        return self.logits(self.trunk(idx))

    def flops_per_token(self) -> int:
        """Training FLOPs per token, as upstream counts: 6 per weight that multiplies, and 12 x width x row length per layer of attention
        (the causal half is not taken off). Embeddings, scalars and the optimizer are not counted."""
        matrices = sum(p.numel() for name, p in self.named_parameters() if p.ndim == 2 and not name.startswith(("embedding", "values")))
        return 6 * matrices + 12 * self.config.n_layer * self.config.n_embd * self.config.sequence_len


def load_model(checkpoint_path: str, device: str = "cpu") -> GPT:
    """The trained model: from token ids [B, T] to float32 logits [B, T, V]. Recomputing the result of a run goes through this."""
    saved = torch.load(checkpoint_path, map_location=device, weights_only=True)
    model = GPT(GPTConfig(**saved["config"]), dtype=torch.bfloat16 if device.startswith("cuda") else torch.float32).to(device)
    model.load_state_dict(saved["model"])
    return model.eval()


# --- optimizer --------------------------------------------------------------------------------------------------------

# Quintic iterations that push all singular values towards 1 (Polar Express, arXiv 2505.16932), for 5 steps with a safety factor of 1.02
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def adamw_update(p: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, h: torch.Tensor) -> None:
    """One AdamW step in place; h = [lr, beta1, beta2, bias1, bias2, weight decay], a tensor so that a new value compiles nothing."""
    lr, beta1, beta2, bias1, bias2, decay = h.unbind()
    grad = grad.float()  # bfloat16 tables keep bfloat16 states; the arithmetic is float32
    mean.copy_(mean.float().lerp(grad, 1 - beta1))
    square.copy_(square.float().lerp(grad.square(), 1 - beta2))
    update = lr / bias1 * mean.float() / ((square.float() / bias2).sqrt() + 1e-10)
    p.copy_(p.float() * (1 - lr * decay) - update)


def muon_update(p: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, square: torch.Tensor, h: torch.Tensor) -> None:
    """One Muon step in place on stacked matrices [N, rows, cols], with NorMuon's scale per neuron; h = [lr, momentum, beta2, decay]."""
    lr, beta, beta2, decay = h.unbind()
    momentum.lerp_(grad, 1 - beta)
    x = grad.lerp(momentum, beta)  # Nesterov
    x = x.bfloat16() if x.is_cuda else x
    tall = x.size(-2) > x.size(-1)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x.mT @ x if tall else x @ x.mT  # the smaller side
        poly = b * gram + c * (gram @ gram)
        x = a * x + (x @ poly if tall else poly @ x)
    x = x.float()
    over = -1 if x.size(-2) >= x.size(-1) else -2
    power = x.square().mean(dim=over, keepdim=True)
    square.lerp_(power, 1 - beta2)
    scale = square.clamp_min(1e-10).rsqrt()
    before, after = power.sum(dim=(-2, -1), keepdim=True).sqrt(), (power * scale.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    x = x * scale * (before / after.clamp_min(1e-10))  # equal sizes per neuron, the update's total size kept
    p.sub_(lr * x + lr * decay * p * (x * p >= 0))  # cautious: decay only where it agrees with the update


class MuonAdamW:
    """Muon for the matrices of the blocks, AdamW for everything else; a group is one shape (Muon) or one learning rate (AdamW)."""

    def __init__(self, model: GPT, compiled: bool) -> None:
        width_scale = (model.config.n_embd / 768) ** -0.5
        matrices = [p for block in model.blocks for p in block.parameters()]
        self.adamw = [
            {"params": [model.embedding.weight, *model.values.parameters()], "lr": EMBEDDING_LR * width_scale, "betas": ADAM_BETAS},
            {"params": [model.head.weight], "lr": UNEMBEDDING_LR * width_scale, "betas": ADAM_BETAS},
            {"params": [model.residual], "lr": SCALAR_LR * 0.01, "betas": ADAM_BETAS},  # multiplies the whole stream: a small rate
            {"params": [model.skip], "lr": SCALAR_LR, "betas": (0.96, 0.95)},
        ]
        if OPTIMIZER == "adamw":
            self.adamw.append({"params": matrices, "lr": ADAMW_MATRIX_LR, "betas": ADAM_BETAS, "decay": WEIGHT_DECAY})
        by_shape = {shape: [p for p in matrices if p.shape == shape] for shape in dict.fromkeys(p.shape for p in matrices)}
        self.muon = list(by_shape.values()) if OPTIMIZER == "muon" else []
        self.state: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.steps = 0
        self.adamw_update = torch.compile(adamw_update, dynamic=False, fullgraph=True) if compiled else adamw_update
        self.muon_update = torch.compile(muon_update, dynamic=False, fullgraph=True) if compiled else muon_update

    @torch.no_grad()
    def step(self, lrm: float, progress: float) -> None:
        """One step with every learning rate times `lrm`; `progress` is the share of the budget."""
        self.steps += 1
        for g, group in enumerate(self.adamw):
            beta1, beta2 = group["betas"]
            h = torch.tensor(
                [group["lr"] * lrm, beta1, beta2, 1 - beta1**self.steps, 1 - beta2**self.steps, group.get("decay", 0.0) * (1 - progress)]
            )
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    mean, square = self._state(f"adamw.{g}.{i}", lambda p=p: (torch.zeros_like(p), torch.zeros_like(p)))
                    self.adamw_update(p, p.grad, mean, square, h.to(p.device, non_blocking=True))
        ramp = min(self.steps / 300, 1.0)
        for g, params in enumerate(self.muon):
            rows, cols = params[0].shape
            h = torch.tensor([MATRIX_LR * lrm * max(1.0, rows / cols) ** 0.5, 0.85 + 0.10 * ramp, 0.95, WEIGHT_DECAY * (1 - progress)])
            stacked, grads = torch.stack(list(params)), torch.stack([p.grad for p in params])
            power = (len(params), rows, 1) if rows >= cols else (len(params), 1, cols)
            momentum, square = self._state(
                f"muon.{g}", lambda stacked=stacked, power=power: (torch.zeros_like(stacked), stacked.new_zeros(power))
            )
            self.muon_update(stacked, grads, momentum, square, h.to(stacked.device, non_blocking=True))
            torch._foreach_copy_(list(params), list(stacked.unbind(0)))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "state": self.state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.steps, self.state = saved["steps"], saved["state"]

    def _state(self, key: str, make: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if key not in self.state:
            self.state[key] = make()
        return self.state[key]


# --- the run ----------------------------------------------------------------------------------------------------------


def learning_rate_scale(progress: float) -> float:
    if progress < WARMUP_RATIO:
        return progress / WARMUP_RATIO
    if progress <= 1 - WARMDOWN_RATIO:
        return 1.0
    left = (1 - progress) / WARMDOWN_RATIO
    return left + (1 - left) * FINAL_LR_FRAC


class Losses:
    """The loss of the model, in training and in evaluation. The fused loss lets both share one compiled trunk."""

    def __init__(self, model: GPT, plan: Plan) -> None:
        self.model, self.fused, self.attention = model, plan.loss == "fused", plan.attention
        compiled = plan.compile in ("model", "both")
        self.trunk = torch.compile(model.trunk, dynamic=False) if compiled else model.trunk
        self.token_nats = torch.compile(model.token_nats, dynamic=False) if compiled else model.token_nats

    def eager(self) -> None:
        """Go on without compilation."""
        self.trunk, self.token_nats = self.model.trunk, self.model.token_nats

    def mean(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss of a batch in nats, with gradients."""
        prepare(self.attention, idx.size(1), idx.device)
        if not self.fused:
            return self.token_nats(idx, targets).mean()
        return fused_loss().mean_loss(self.trunk(idx).flatten(0, 1), self._head(), targets.flatten(), self.model.config.softcap)

    def per_token(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Loss of every token in nats [B, T], for the evaluation."""
        prepare(self.attention, idx.size(1), idx.device)
        if not self.fused:
            with torch.no_grad():
                return self.token_nats(idx, targets)
        x = self.trunk(idx).detach()  # with gradients on, or the trunk would be compiled a second time
        return fused_loss().token_losses(x.flatten(0, 1), self._head(), targets.flatten(), self.model.config.softcap).view_as(targets)

    def _head(self) -> torch.Tensor:
        return self.model.head.weight.to(self.model.dtype)


def fused_loss() -> ModuleType:
    import fused_loss  # imports triton, which a CPU-only torch does not bring

    return fused_loss


class Training:
    """One run's training: launches steps, reports them when the device is done with them, and keeps the state to go on from."""

    def __init__(self, plan: Plan, model: GPT, losses: Losses, data: Dataset, report: Report) -> None:
        self.plan, self.model, self.losses, self.data, self.report = plan, model, losses, data, report
        self.rows = data.train_rows(plan.seq_len)
        if len(self.rows) < plan.device_rows:
            few = f"the corpus fills {len(self.rows)} rows, fewer than one pass of {plan.device_rows}"
            raise BadSetting(f"{few}; lower {'TOTAL_BATCH_SIZE' if len(self.rows) else 'SEQ_LEN'} or take more text")
        self.optimizer = MuonAdamW(model, compiled=plan.compile in ("optimizer", "both"))
        self.clock, self.smooth, self.reader = BudgetClock(TIME_BUDGET, UNCOUNTED_STEPS[plan.device.type]), 0.0, LossReader(plan.device)
        self.queued: deque[tuple[float, int]] = deque()  # learning-rate scale and epoch of the steps that are launched and not reported
        self.flops_a_step = model.flops_per_token() * plan.total_batch
        name = facts(plan.device)["gpu_name"]
        self.peak = peak_flops(name) if name else None
        self.saved_at = 0.0
        self.identity = self._identity()  # now: the file may be edited while it runs

    def run(self) -> None:
        """Train until the budget is spent."""
        self._resume()
        if self.plan.compile != "none":
            self.report.stage("compiling")
        else:
            self.report.stage("training")
        self._start_feed()
        launch = self._first_launch
        while not self.clock.done:
            launch()
            launch = self._launch_step
            if self.reader.ready:
                self._report_step()
            if self.clock.trained_s - self.saved_at >= CHECKPOINT_EVERY_S:
                self._save()
        while self.queued:
            self._report_step()

    def _first_launch(self) -> None:
        """The launch that compiles; where the compiler fails, the run starts anew without it, and says so."""
        compiled = self.plan.compile != "none"
        before = {name: value.cpu() for name, value in self.model.state_dict().items()} if compiled else {}
        try:
            with self.report.waiting("compiling", compiled):
                self._launch_step()
        except Exception as error:
            reason = compiler_fault(error)
            if reason is None or not compiled:
                raise
            without_compiler(reason, self.plan, self.model, self.losses, self.data, self.report)
            self.optimizer = MuonAdamW(self.model, compiled=False)
            self.model.load_state_dict(before)
            self.model.zero_grad(set_to_none=True)
            self._resume()
            self._start_feed()
            self._launch_step()

    def _start_feed(self) -> None:
        self.feed = batches(self.rows, self.plan.device_rows, self.plan.device, SEED, skip=self.clock.steps * self.plan.micro_steps)
        self.clock.restart()

    def _launch_step(self) -> None:
        progress = self.clock.share
        lrm = learning_rate_scale(progress)
        for _ in range(self.plan.micro_steps):
            inputs, targets, epoch = next(self.feed)
            loss = self.losses.mean(inputs, targets)
            (loss / self.plan.micro_steps).backward()
        self.optimizer.step(lrm, progress)
        self.model.zero_grad(set_to_none=True)
        self.reader.push(loss)
        self.queued.append((lrm, epoch))

    def _report_step(self) -> None:
        loss = self.reader.pop()  # waits for the device
        lrm, epoch = self.queued.popleft()
        self.report.check_loss(self.clock.steps, loss)
        self.clock.step_done()
        self.smooth = 0.9 * self.smooth + 0.1 * loss
        mfu = None if self.peak is None else 100 * self.flops_a_step / self.clock.dt_s / self.peak
        tok_s = self.plan.total_batch / self.clock.dt_s
        self.report.step(self.clock, self.smooth / (1 - 0.9**self.clock.steps), loss, lrm, tok_s, mfu, epoch)
        if self.clock.steps == 1:
            gc.collect()
            gc.freeze()
            gc.disable()  # a collection stalls a step by half a second
            if self.plan.compile != "none":
                self.report.stage("training")

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a saved state to go on from: an edited script is another experiment, whatever the edit."""
        with open(__file__, "rb") as file:
            script = hashlib.sha256(file.read()).hexdigest()
        return {"script": script, "total_batch": self.plan.total_batch, "data": self.data.data_id, "config": asdict(self.model.config)}

    def _save(self) -> None:
        while self.queued:
            self._report_step()
        clock = {"steps": self.clock.steps, "trained_s": self.clock.trained_s, "smooth": self.smooth}
        state = {"identity": self.identity, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "clock": clock}
        save(state, STATE_FILE, self.report, "if this run is interrupted it starts from the beginning")
        self.saved_at = self.clock.trained_s
        self.clock.restart()  # writing is not training

    def _resume(self) -> None:
        state = load(STATE_FILE, self.identity, self.plan.device, self.report)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.smooth, self.saved_at = state["clock"]["smooth"], state["clock"]["trained_s"]
        self.clock.resume(state["clock"]["steps"], self.saved_at)
        self.report.note(f"going on from step {self.clock.steps}, {self.saved_at:.0f} s into the budget")


def without_compiler(reason: str, plan: Plan, model: GPT, losses: Losses, data: Dataset, report: Report) -> None:
    """Take the compiled model out of use, loudly: in the log, as a note and as an attribute. Flex is the compiler's, too."""
    plan = replace(plan, compile="none", attention="default" if plan.attention == "flex" else plan.attention)
    losses.eager()
    for block in model.blocks:
        block.attention.backend = plan.attention
    report.note(f"torch.compile failed ({reason}); this run goes on without it, slower")
    attributes = announcement(globals(), plan, model, data)["attributes"]
    report.event("attributes", attributes={**attributes, "compile_failed": reason})


def one_pass(model: GPT, plan: Plan, rows: int) -> None:
    """Forward and backward of so many rows, without compilation, which needs a little more memory."""
    tokens = torch.zeros((rows, plan.seq_len), dtype=torch.long, device=plan.device)
    Losses(model, replace(plan, compile="none")).mean(tokens, tokens).backward()


def run(report: Report) -> None:
    started = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    device = choose_device()
    foreign_gib = held_by_others_gib(device)
    data = load_dataset(say=report.note)
    plan = make_plan(globals(), PRESETS[device.type], data.seq_len, data.folder.parent, device)
    config = GPTConfig(plan.seq_len, data.vocab_size, plan.depth, plan.n_head, plan.width, VALUE_EMBEDDINGS, SOFTCAP)
    torch.manual_seed(SEED)
    with device:
        model = GPT(config, plan.attention, torch.bfloat16 if device.type == "cuda" else torch.float32)
        model.init_weights()
    start = announcement(globals(), plan, model, data)
    report.event("start", **start)
    print(f"Data: {data.data_id}, evaluator {EVALUATOR}")
    print(f"Model config: {asdict(model.config)}")
    print(f"Attributes: {start['attributes']}")
    print(f"Estimated FLOPs per token: {start['flops_per_token']:e}")
    print(f"Time budget: {TIME_BUDGET}s")

    losses = Losses(model, plan)
    training = Training(plan, model, losses, data, report)
    exhausted = False
    try:
        training.run()
    except (RuntimeError, MemoryError) as error:
        if not exhausts(error):
            raise
        exhausted = True  # only behind the handler is the memory of the failed pass free: until then the traceback holds it
    if exhausted:
        model.zero_grad(set_to_none=True)
        out_of_memory(plan, foreign_gib, lambda rows: one_pass(model, plan, rows), report)
    clock = training.clock
    report.stage("evaluating")
    eval_started = time.perf_counter()
    eval_rows = max(1, plan.device_rows * plan.seq_len // data.seq_len)
    try:
        val_bpb = evaluate_bpb(losses.per_token, data, eval_rows, device)
    except Exception as error:
        if plan.compile == "none" or (reason := compiler_fault(error)) is None:
            raise
        without_compiler(reason, plan, model, losses, data, report)
        val_bpb = evaluate_bpb(losses.per_token, data, eval_rows, device)
    eval_seconds = time.perf_counter() - eval_started
    saved = {"format": 1, "config": asdict(model.config), "model": model.state_dict(), "data": data.data_id, "evaluator": EVALUATOR}
    save(saved, CHECKPOINT_FILE, report, "this run cannot be verified")
    tok_s = plan.total_batch * (clock.steps - clock.uncounted) / clock.trained_s
    report.summary(
        {
            "val_bpb": val_bpb,
            "training_seconds": clock.trained_s,
            "total_seconds": time.perf_counter() - started,
            "peak_vram_mb": peak_memory_mib(device),
            "mfu_percent": None if training.peak is None else 100 * start["flops_per_token"] * tok_s / training.peak,
            "total_tokens_M": clock.steps * plan.total_batch / 1e6,
            "num_steps": clock.steps,
            "num_params_M": start["num_params"] / 1e6,
            "depth": plan.depth,
        },
        tok_s=tok_s,
        eval_seconds=eval_seconds,
        train_tokens_dropped_share=data.dropped_share(training.rows),
    )


def main() -> None:
    with contextlib.closing(Report()) as report, one_sentence(report):
        run(report)


if __name__ == "__main__":
    main()
