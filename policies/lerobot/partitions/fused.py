"""The fast path of a small SmolVLA in fewer operations: the arithmetic of lerobot's `denoise_step` (tests compare).

On a small network most operations take longer to begin than to do. Here

- what does not change between flow steps is made once per chunk: keys and values of cross attention, masks, rotations;
- projections of the same input are one matrix, which has the norm's and the attention's scale in it;
- a rotation is a product of complex numbers: in each head the halves that turn together lie side by side;
- tokens that are masked are left out, where lerobot weighs them with 0.

Shapes: t tokens, H actions, n tokens of the prefix with the state, kv heads of keys, d numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

if TYPE_CHECKING:
    from lerobot.policies.smolvla.modeling_smolvla import VLAFlowMatching

_MOST = 20_000_000
"""parameters: in a larger network the matrices' own time counts, and a copy of them costs memory"""
_LONGEST_WAVE = 10_000.0


class FusedSmolVLA:
    """A copy of what `act` uses of one network, for one observation at a time."""

    def __init__(self, model: VLAFlowMatching) -> None:
        """`model`: one that `is_compatible`."""
        from lerobot.policies.smolvla.modeling_smolvla import create_sinusoidal_pos_embedding

        language, experts = _layers(model)
        network, config = model.vlm_with_expert, model.config
        every, cross = network.self_attn_every_n_layers, "cross" in network.attention_mode
        self._model = model
        self._parameters = _parameters(model)
        self._written = _written(self._parameters)
        # an inference tensor may not be written to where guidance needs gradients
        with torch.inference_mode(False), torch.no_grad():
            self._language = [_Layer(layer, True) for layer in language]
            self._experts = [
                (i, _Layer(layer, not cross or (every > 0 and i % every == 0)))
                for i, layer in enumerate(experts)
                if layer is not None
            ]
            self._least = _least(network.lm_expert.norm)
            width = network.expert_hidden_size
            of_action, of_time = model.action_time_mlp_in.weight.split(width, 1)
            self._enter = (of_action @ model.action_in_proj.weight).t().contiguous()
            self._entered = model.action_time_mlp_in.bias + of_action @ model.action_in_proj.bias
            self._of_time = of_time
            self._mix, self._mixed = _turned(model.action_time_mlp_out.weight), model.action_time_mlp_out.bias.clone()
            self._leave = _turned(model.action_out_proj.weight * _scale(network.lm_expert.norm))
            self._left = model.action_out_proj.bias.clone()
        self._embed = lambda time: create_sinusoidal_pos_embedding(
            time, width, config.min_period, config.max_period, device=time.device
        ).float()
        self._times: dict[float, Tensor] = {}
        self._horizon = config.chunk_size
        self._known: tuple[int, Tensor, Tensor, Tensor] | None = None

    def copies(self, model: VLAFlowMatching) -> bool:
        """Whether this is a copy of what `model` is now."""
        return self._model is model and self._written == _written(self._parameters)

    @staticmethod
    def is_compatible(model: VLAFlowMatching) -> bool:
        """Whether this arithmetic is the network's: small, of plain float32 layers."""
        layers = [layer for part in _layers(model) for layer in part if layer is not None]
        parameters = _parameters(model)
        return (
            all(_plain(layer) for layer in layers)
            and all(type(part) is nn.Linear for part in _heads(model))
            and all(p.dtype == torch.float32 and not p.is_inference() for p in parameters)
            and sum(p.numel() for p in parameters) <= _MOST
        )

    def velocity(self, latent: list[Tensor], state: Tensor) -> Callable[[Tensor, float], Tensor]:
        """The flow's velocity [1, H, width] at x [1, H, width] and a flow time, for one latent and state [1, ds]."""
        real = latent[2][0] > 0.5
        seen_keys, seen_values = (part[:, 0, real].float().transpose(1, 2) for part in latent[:2])
        count, kv, before, d = seen_keys.shape
        n = before + 1
        with torch.inference_mode(False):
            keys, values = (seen_keys.new_empty(count, kv, n + self._horizon, d) for _ in range(2))
        keys[:, :, :before] = seen_keys.unflatten(3, (2, d // 2)).transpose(3, 4).flatten(3)
        values[:, :, :before] = seen_values
        if self._known is None or self._known[0] != n:
            self._known = n, *self._positions(n, d, keys.device)
        _, position, positions, mask = self._known
        model = self._model
        x = torch.addmm(model.state_proj.bias, state, model.state_proj.weight.t())
        for i, layer in enumerate(self._language):
            query = layer.project(x, position, keys[i], values[i], before)
            if i + 1 < len(self._language):  # what else the last one computes is for the next
                x = layer.finish(x, query, keys[i, :, :n], values[i, :, :n])
        begins, own = positions[: self._horizon], positions[n : n + self._horizon]
        plan: list[tuple[_Layer, Tensor, Tensor, Tensor, Tensor | None]] = []
        for i, layer in self._experts:
            if layer.own:
                plan.append((layer, own, keys[i], values[i], mask.repeat(layer.groups, 1)))
            else:
                plan.append((layer, begins, *layer.cross(keys[i, :, :n], values[i, :, :n]), None))

        def step(x: Tensor, time: float) -> Tensor:
            h = silu(torch.addmm(self._time(time, x.device), x[0], self._enter))
            h = torch.addmm(self._mixed, h, self._mix)
            for layer, rotation, k, v, hidden in plan:
                h = layer.finish(h, layer.project(h, rotation, k, v, n), k, v, hidden)
            return torch.addmm(self._left, _normed(h, self._least), self._leave)[None]

        return step

    def _time(self, time: float, device: torch.device) -> Tensor:
        """[width]: what flow time `time` adds before the first non-linearity, with the biases."""
        if time not in self._times:
            with torch.inference_mode(False), torch.no_grad():
                at = torch.tensor([time], dtype=torch.float32, device=device)
                self._times[time] = self._entered + (self._embed(at) @ self._of_time.t())[0]
        return self._times[time]

    def _positions(self, n: int, d: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Rotations of the state [1, 1, d / 2] and of all positions [n + H, 1, d / 2]; the mask [H, n + H]."""
        with torch.inference_mode(False):
            scale = _LONGEST_WAVE ** (2 / d * torch.arange(d // 2, dtype=torch.float32, device=device))
            angle = torch.arange(n + self._horizon, dtype=torch.float32, device=device)[:, None, None] / scale
            positions = torch.polar(torch.ones_like(angle), angle)
            ahead = torch.full((self._horizon, self._horizon), -torch.inf, device=device).triu(1)
            mask = torch.cat([torch.zeros(self._horizon, n, device=device), ahead], 1)
        return positions[n - 1 : n], positions, mask


class _Layer:
    """One layer of the language model or of its expert; `own`: its tokens also attend to each other."""

    def __init__(self, layer: Any, own: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        d = self._d = attention.head_dim
        self._heads = attention.q_proj.out_features // d
        self._kv = attention.k_proj.out_features // d
        self.own, self.groups = own, self._heads // self._kv
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        self._least = _least(first), _least(second)
        query = _paired(attention.q_proj.weight, d) * d**-0.5
        key, value = _paired(attention.k_proj.weight, d), attention.v_proj.weight
        parts = [query, key, value] if own else [query]
        self._first = _turned(torch.cat(parts) * _scale(first))
        self._turns = (self._heads + self._kv if own else self._heads) * d
        # the keys that cross attention projects come paired as well
        self._cross = (_turned(_paired(key.t(), d).t()), _turned(value)) if not own else None
        self._out = _turned(attention.o_proj.weight)
        self._up = _turned(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * _scale(second))
        self._down = _turned(mlp.down_proj.weight)

    def project(self, x: Tensor, rotation: Tensor, keys: Tensor, values: Tensor, at: int) -> Tensor:
        """Queries [kv, groups * t, d] of x [t, width]; the tokens' own keys and values are written from row `at` on."""
        t, d = len(x), self._d
        y = torch.mm(_normed(x, self._least[0]), self._first)
        pairs = torch.view_as_complex(y[:, : self._turns].view(t, -1, d // 2, 2))
        turned = torch.view_as_real(pairs * rotation).view(t, -1, d)
        if self.own:
            keys[:, at : at + t] = turned[:, self._heads :].transpose(0, 1)
            values[:, at : at + t] = y[:, self._turns :].view(t, -1, d).transpose(0, 1)
        return turned[:, : self._heads].view(t, self._kv, self.groups, d).permute(1, 2, 0, 3).reshape(self._kv, -1, d)

    def finish(self, x: Tensor, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """[t, width] after the layer; `mask`: float[groups * t, tokens], added to the scores."""
        t = len(x)
        # on these sizes three operations are faster than the fused one
        to = keys.transpose(1, 2)
        scores = torch.bmm(query, to) if mask is None else torch.baddbmm(mask, query, to)
        found = torch.bmm(scores.softmax(2), values)
        found = found.view(self._kv * self.groups, t, self._d).transpose(0, 1).reshape(t, -1)
        x = torch.addmm(x, found, self._out)
        y = torch.mm(_normed(x, self._least[1]), self._up)
        gate, up = y.chunk(2, 1)
        return torch.addmm(x, silu(gate).mul_(up), self._down)

    def cross(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What cross attention makes of the prefix's keys and values, [kv, n, d] each."""
        assert self._cross is not None
        n = keys.shape[1]
        made = (
            torch.mm(part.transpose(0, 1).reshape(n, -1), matrix)
            for part, matrix in zip((keys, values), self._cross, strict=True)
        )
        key, value = (part.view(n, self._kv, self._d).transpose(0, 1).contiguous() for part in made)
        return key, value


def _normed(x: Tensor, least: Tensor) -> Tensor:
    """Rows of x [t, width] at the length 1, where torch's `rms_norm` (eight operations) makes it sqrt(width), which the
    matrix behind it has in it. `least`: sqrt(width * epsilon)."""
    return x / torch.hypot(torch.linalg.vector_norm(x, 2, 1, True), least)


def _least(norm: Any) -> Tensor:
    """See `_normed`."""
    weight = norm.weight.detach()
    return weight.new_tensor((len(weight) * norm.variance_epsilon) ** 0.5)


def _scale(norm: Any) -> Tensor:
    """What the matrix behind a norm has in it, [width]."""
    weight: Tensor = norm.weight.detach()
    return weight * len(weight) ** 0.5


def _paired(weight: Tensor, d: int) -> Tensor:
    """Rows of `weight`, in each head of d those that a rotation turns together side by side."""
    return weight.unflatten(0, (-1, 2, d // 2)).transpose(1, 2).flatten(0, 2)


def _turned(weight: Tensor) -> Tensor:
    """[out, in] to a contiguous copy [in, out]"""
    return weight.detach().t().clone(memory_format=torch.contiguous_format)


def _layers(model: VLAFlowMatching) -> list[list[Any]]:
    network = model.vlm_with_expert
    found: list[list[Any]] = network.get_model_layers([network.get_vlm_model().text_model, network.lm_expert])
    return found


def _heads(model: VLAFlowMatching) -> list[nn.Module]:
    """What lies between robot and layers."""
    names = ("state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out")
    return [getattr(model, name) for name in names]


def _plain(layer: Any) -> bool:
    """Whether a layer is Llama's, its matrices neither replaced nor with biases."""
    attention, mlp = layer.self_attn, layer.mlp
    matrices = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return (
        all(type(m) is nn.Linear and m.bias is None for m in (*matrices, mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        and mlp.config.hidden_act == "silu"
        and all(hasattr(norm, "variance_epsilon") for norm in (layer.input_layernorm, layer.post_attention_layernorm))
    )


def _parameters(model: VLAFlowMatching) -> list[Tensor]:
    """All that is copied, and the state's projection."""
    parts = [*_heads(model), model.vlm_with_expert.lm_expert.norm]
    parts += [layer for layers in _layers(model) for layer in layers if layer is not None]
    return [parameter for part in parts for parameter in part.parameters()]


def _written(parameters: list[Tensor]) -> list[tuple[int, int]]:
    """What changes whenever one of them is written to."""
    return [(parameter.data_ptr(), parameter._version) for parameter in parameters]
