class WeightUpdater:
    def get_model(self):
        return self.model

    def update_weights_from_disk(self, model_path, load_format, weight_name_filter=None, recapture_cuda_graph=False):
        return True, "updated"

    def load_weights_from_distributed(self, named_tensors):
        return True, "updated"

    def update_weights_from_tensor(self, named_tensors, load_format=None):
        return True, "updated"

    def update_weights_from_ipc(self, recv_req):
        return True, "updated"
