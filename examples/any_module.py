"""A model that no library has an architecture for, on the packed weights of a checkpoint.

pip install bitline
python examples/any_module.py
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import bitline


class Forecaster(nn.Module):
    """A convolution over a series, two linear layers, an output layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv1d(4, 256, 5, padding=2), nn.LayerNorm(256)
        self.up, self.down, self.head = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.Linear(256, 1)

    def forward(self, series):
        """[batch, 4, time] to [batch, time, 1]."""
        x = self.stem(series).transpose(1, 2)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


torch.manual_seed(0)
trained, series = Forecaster(), torch.randn(8, 4, 64)
with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
    # A checkpoint as a quantizer would write it, in compressed-tensors' format; the output layer stays as it is.
    tensors = {f"net.{name}": tensor for name, tensor in trained.state_dict().items()}
    for name in ("net.up", "net.down"):
        weight = bitline.quantize(tensors.pop(f"{name}.weight"), "W4A16", group_size=64)
        tensors[f"{name}.weight_packed"] = weight.codes.view(torch.int32)
        tensors |= {f"{name}.weight_scale": weight.scale, f"{name}.weight_shape": torch.tensor(weight.shape)}
    save_file(tensors, Path(folder, "model.safetensors"))
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["head"],
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}}  # fmt: skip
    Path(folder, "config.json").write_text(json.dumps({"quantization_config": config}))

    with torch.device("meta"):  # no memory for weights that are about to be replaced
        model = Forecaster()
    done = bitline.replace_linears(model, folder, prefix="net", dtype=torch.bfloat16)
    print(f"packed: {', '.join(done.layers)}; loaded as they are: {', '.join(done.tensors)}")
    print(model.up)
    checks = bitline.verify(model)
    exact, found = trained(series), model(series.bfloat16()).float()
    print(f"{len(checks)} outputs agree with the reference")
    print(f"4 bits in bfloat16 against float32: {((found - exact).norm() / exact.norm()):.3f} of the output's norm")
