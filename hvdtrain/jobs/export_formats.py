"""The forms that a model is exported in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """A form to export in.

    Attributes:
        framework: the framework whose model is written.
        suffix: ending of the file's name; empty for a directory.
        packages: what it takes beside the framework.
        loading: a line of Python that loads it; {path} stands for the file.
    """

    framework: str
    suffix: str
    packages: tuple[str, ...]
    loading: str


EXPORT_FORMATS = {
    "safetensors": Form(
        "torch",
        ".safetensors",
        ("safetensors",),
        'model.load_state_dict(safetensors.torch.load_file("{path}"))',
    ),
    "pt": Form("torch", ".pt", (), 'model.load_state_dict(torch.load("{path}", weights_only=True))'),
    "torch-export": Form("torch", ".pt2", (), 'torch.export.load("{path}").module()(inputs)'),
    "onnx": Form(
        "torch",
        ".onnx",
        ("onnx", "onnxscript", "onnxruntime"),
        'onnxruntime.InferenceSession("{path}").run(None, {{"inputs": inputs}})',
    ),
    "keras": Form("tf", ".keras", (), 'keras.models.load_model("{path}")'),
    "saved-model": Form(
        "tf", "", (), 'tf.saved_model.load("{path}").signatures["serving_default"](inputs=inputs)'
    ),
}
