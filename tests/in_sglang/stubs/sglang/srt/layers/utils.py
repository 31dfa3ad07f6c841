import torch


class PPMissingLayer(torch.nn.Identity):
    pass
