"""A callback of your own, for both frameworks: a picture of the wrong predictions after each evaluation.

    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/wrong_predictions.py:WatchedDigits
    horovodrun -np 2 python -m hvdtrain --framework tf --task examples/wrong_predictions.py:WatchedDigits

The pictures are in the run directory, ``images/step-00000045-wrong.png`` and so on, and in TensorBoard. The
number of wrong predictions is in metrics.jsonl and in TensorBoard, too.
"""

import numpy as np
from PIL import Image, ImageDraw

from hvdtrain import Callback
from hvdtrain.tasks.digits import Digits

SCALE, COLUMNS = 8, 8  # pixels for each of a scan's; pictures in a row
SIDE, CAPTION = 8 * SCALE, 14
WIDTH, HEIGHT = SIDE + 16, SIDE + CAPTION + 8


class WrongPredictions(Callback):
    """Draws the evaluation samples that the model gets wrong. Only rank 0 calls it."""

    def on_start(self, context):
        self.context = context
        data = context.eval_data
        samples = [data[index] for index in range(len(data))]
        self.inputs = np.stack([sample["inputs"] for sample in samples])
        self.targets = np.stack([sample["targets"] for sample in samples])

    def on_evaluation(self, step, metrics):
        predictions = self.predict()
        (wrong,) = np.nonzero(predictions != self.targets)
        title = f"step {step.step}: {len(wrong)} of {len(self.targets)} predictions are wrong"
        picture = self.draw(title, predictions, wrong)
        self.context.log(step, {"wrong_predictions": len(wrong), "wrong": picture})

    def predict(self):
        """Return the predicted digit of each sample. The model is in evaluation mode already."""
        model = self.context.model
        if self.context.config.framework == "tf":
            return model(self.inputs, training=False).numpy().argmax(-1)
        import torch

        device = next(model.parameters()).device
        with torch.no_grad():
            return model(torch.from_numpy(self.inputs).to(device)).cpu().numpy().argmax(-1)

    def draw(self, title, predictions, wrong):
        """Return a picture with a row of COLUMNS scans after another, each with its caption."""
        rows = -(-len(wrong) // COLUMNS)
        picture = Image.new("L", (COLUMNS * WIDTH, CAPTION + 4 + rows * HEIGHT), 255)
        pen = ImageDraw.Draw(picture)
        pen.text((4, 2), title, fill=0)
        for place, index in enumerate(wrong):
            x = place % COLUMNS * WIDTH + 8
            y = place // COLUMNS * HEIGHT + CAPTION + 8
            pixels = (self.inputs[index, :, :, 0] * 6.0 + 4.9) * 255 / 16  # as scanned: 0 to 16
            scan = Image.fromarray((255 - pixels).clip(0, 255).astype(np.uint8))
            picture.paste(scan.resize((SIDE, SIDE), Image.Resampling.NEAREST), (x, y))
            pen.text((x, y + SIDE), f"{self.targets[index]} taken for {predictions[index]}", fill=0)
        return picture


class WatchedDigits(Digits):
    """The built-in task, with the callback."""

    def callbacks(self):
        return [WrongPredictions()]
