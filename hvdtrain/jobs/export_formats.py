"""The formats that a model can be exported in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExportFormat:
    """A format to export in.

    Attributes:
        framework: the framework whose model is written.
        suffix: ending of the file's name; empty for a directory.
        packages: what it takes beside the framework.
        loading: a line of Python that loads it and, if it is a program, calls it. {path} stands for the
            file, {arguments}, {keywords} and {mapping} for the inputs.
    """

    framework: str
    suffix: str
    packages: tuple[str, ...]
    loading: str


EXPORT_FORMATS = {
    "safetensors": ExportFormat(
        "torch",
        ".safetensors",
        ("safetensors",),
        'model.load_state_dict(safetensors.torch.load_file("{path}"))',
    ),
    "pt": ExportFormat("torch", ".pt", (), 'model.load_state_dict(torch.load("{path}", weights_only=True))'),
    "torch-export": ExportFormat("torch", ".pt2", (), 'torch.export.load("{path}").module()({arguments})'),
    "onnx": ExportFormat(
        "torch",
        ".onnx",
        ("onnx", "onnxscript", "onnxruntime"),
        'onnxruntime.InferenceSession("{path}").run(None, {{{mapping}}})',
    ),
    "keras": ExportFormat("tf", ".keras", (), 'keras.models.load_model("{path}")'),
    "saved-model": ExportFormat(
        "tf", "", (), 'tf.saved_model.load("{path}").signatures["serving_default"]({keywords})'
    ),
}
