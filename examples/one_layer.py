"""One quantized linear layer: from a weight, its kernel and the reasons for it, its error, and a tensor-parallel shard.

python examples/one_layer.py
"""

import torch

import bitline

torch.manual_seed(0)
w = torch.randn(1024, 2048, dtype=torch.bfloat16) * 0.02
weight = bitline.quantize(w, "W4A16", group_size=128)  # or open_checkpoint(path).layer(name).weight()
layer = bitline.QuantLinear(weight)
x = torch.randn(3, 2048, dtype=torch.bfloat16)
y = layer(x)

print(layer.choice.explain().splitlines()[1])
exact = x.double() @ weight.dequantize().double().T
print(f"largest error against float64: {(y.double() - exact).abs().max():.2g} of {exact.abs().max():.2g}")

# On hardware that is not here:
print("an H200 would run", bitline.choose(weight.spec, "cuda:sm90").best.name)

# Two ranks that cut K give two products, whose sum is the layer's.
halves = [bitline.QuantLinear(weight.shard(1, rank=rank, world=2)) for rank in range(2)]
parts = [half(part) for half, part in zip(halves, x.chunk(2, dim=1), strict=True)]
print(f"cut in two, largest difference: {(sum(parts).double() - y.double()).abs().max():.2g}")
