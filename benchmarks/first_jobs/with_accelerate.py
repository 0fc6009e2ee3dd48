"""The jobs with Accelerate: torchrun --nproc-per-node 2 with_accelerate.py JOB.

`accelerate launch --cpu --num_processes 2` would start one process, without a word.
"""

import sys

import common
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader


def prepare(accelerator, model, **options):
    set_seed(0)
    train_set, eval_set = common.torch_sets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loaders = DataLoader(train_set, 16, shuffle=True), DataLoader(eval_set, 16)
    return accelerator.prepare(model, optimizer, *loaders)


def train_epoch(accelerator, model, optimizer, loader, weights=None):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(inputs), targets, weights))
        optimizer.step()


def outputs_of(accelerator, model, loader):
    model.eval()
    gathered = []
    with torch.no_grad():
        for inputs, targets in loader:
            gathered.append(accelerator.gather_for_metrics((model(inputs), targets)))
    outputs, targets = zip(*gathered, strict=True)
    return torch.cat(outputs), torch.cat(targets)


def evaluate(accelerator, model, loader):
    outputs, targets = outputs_of(accelerator, model, loader)
    accuracy = (outputs.argmax(1) == targets).float().mean()
    return {"loss": cross_entropy(outputs, targets).item(), "accuracy": accuracy.item()}


def train():
    accelerator = Accelerator(cpu=True)
    model, optimizer, train_loader, eval_loader = prepare(accelerator, common.torch_model())
    for _ in range(5):
        train_epoch(accelerator, model, optimizer, train_loader)
        found = evaluate(accelerator, model, eval_loader)
        accelerator.print(found)
    return found


def f1():
    from sklearn.metrics import f1_score

    accelerator = Accelerator(cpu=True)
    model, optimizer, train_loader, eval_loader = prepare(accelerator, common.torch_model())
    for _ in range(5):
        train_epoch(accelerator, model, optimizer, train_loader)
        outputs, targets = outputs_of(accelerator, model, eval_loader)
    return {"f1": f1_score(targets.numpy(), outputs.argmax(1).numpy(), average="macro")}


def schedule():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, train_loader, eval_loader = prepare(accelerator, common.torch_model())
    steps = 5 * -(-len(train_loader) // 2)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - 20)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [20])
    for _ in range(5):
        model.train()
        for inputs, targets in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    both.step()
                optimizer.zero_grad()
    return evaluate(accelerator, model, eval_loader)


def best():
    accelerator = Accelerator(cpu=True)
    model, optimizer, train_loader, eval_loader = prepare(accelerator, common.torch_model())
    highest = -1.0
    for _ in range(5):
        train_epoch(accelerator, model, optimizer, train_loader)
        found = evaluate(accelerator, model, eval_loader)
        if found["accuracy"] > highest:
            highest = found["accuracy"]
            accelerator.save_state(str(common.FOLDER / "best"))
    accelerator.load_state(str(common.FOLDER / "best"))
    return evaluate(accelerator, model, eval_loader)


def resume():
    for begins in (True, False):
        accelerator = Accelerator(cpu=True)
        model, optimizer, train_loader, eval_loader = prepare(accelerator, common.torch_model())
        done, steps = 0, 5 * len(train_loader)
        if not begins:
            accelerator.load_state(str(common.FOLDER / "resume"))
            done = 100
        while done < steps:
            model.train()
            train_loader.set_epoch(done // len(train_loader))
            rest = accelerator.skip_first_batches(train_loader, done % len(train_loader))
            for inputs, targets in rest:
                optimizer.zero_grad()
                accelerator.backward(cross_entropy(model(inputs), targets))
                optimizer.step()
                done += 1
                if begins and done == 100:
                    accelerator.save_state(str(common.FOLDER / "resume"))
                    break
            if begins and done == 100:
                break
        accelerator.free_memory()
    return evaluate(accelerator, model, eval_loader)


def early_stopping():
    accelerator = Accelerator(cpu=True)
    model, optimizer, train_loader, eval_loader = prepare(accelerator, common.torch_model())
    highest, waited = -1.0, 0
    for epoch in range(1, 51):  # noqa: B007 - the last one is reported
        train_epoch(accelerator, model, optimizer, train_loader)
        found = evaluate(accelerator, model, eval_loader)
        waited = 0 if found["accuracy"] > highest else waited + 1
        highest = max(highest, found["accuracy"])
        if waited >= 2:
            break
    return {"steps": epoch * len(train_loader), **found}


def class_weights():
    accelerator = Accelerator(cpu=True)
    model, optimizer, train_loader, eval_loader = prepare(accelerator, common.torch_model())
    weights = torch.tensor([1.0] * 5 + [2.0] * 5, device=accelerator.device)
    for _ in range(5):
        train_epoch(accelerator, model, optimizer, train_loader, weights)
    return evaluate(accelerator, model, eval_loader)


def average():
    accelerator = Accelerator(cpu=True)
    model, optimizer, train_loader, eval_loader = prepare(accelerator, common.torch_model())
    function = torch.optim.swa_utils.get_ema_multi_avg_fn(0.95)
    averaged = torch.optim.swa_utils.AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=function)
    for _ in range(5):
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(inputs), targets))
            optimizer.step()
            averaged.update_parameters(accelerator.unwrap_model(model))
    return evaluate(accelerator, averaged, eval_loader)


def contrastive():
    from torch.distributed.nn.functional import all_gather

    def compare(model, inputs):
        embedded, noisy = normalize(model(inputs), dim=1), normalize(model(inputs + 0.1), dim=1)
        others = torch.cat(all_gather(noisy))
        own = torch.arange(len(inputs)) + accelerator.process_index * len(inputs)
        return cross_entropy(embedded @ others.T / 0.1, own)

    accelerator = Accelerator(cpu=True)
    model, optimizer, train_loader, eval_loader = prepare(accelerator, common.torch_model(16))
    for _ in range(5):
        model.train()
        for inputs, _targets in train_loader:
            optimizer.zero_grad()
            accelerator.backward(compare(model, inputs))
            optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [compare(model, inputs) for inputs, _ in eval_loader]
    return {"loss": accelerator.reduce(torch.stack(losses).mean(), "mean").item()}


def pictures():
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=common.FOLDER / "pictures")
    accelerator.init_trackers("digits")
    model, optimizer, train_loader, eval_loader = prepare(accelerator, common.torch_model())
    for epoch in range(5):
        train_epoch(accelerator, model, optimizer, train_loader)
        outputs, targets = outputs_of(accelerator, model, eval_loader)
        if accelerator.is_main_process:
            wrong = (outputs.argmax(1) != targets).numpy()
            image = common.picture(common.EVAL[0][wrong])[None, :, :, None]
            accelerator.get_tracker("tensorboard").log_images({"wrong": image}, epoch, dataformats="NHWC")
    accelerator.end_training()
    return evaluate(accelerator, model, eval_loader)


def serve():
    accelerator = Accelerator(cpu=True)
    model, optimizer, train_loader, eval_loader = prepare(accelerator, common.torch_model())
    for _ in range(5):
        train_epoch(accelerator, model, optimizer, train_loader)
    outputs, _ = outputs_of(accelerator, model, eval_loader)
    if accelerator.is_main_process:
        file = common.FOLDER / "model.onnx"
        torch.onnx.export(accelerator.unwrap_model(model), (torch.zeros(1, 64),), file, dynamo=True)
    accuracy = (outputs.argmax(1).numpy() == common.EVAL[1]).mean()
    return {"accuracy": float(accuracy)}


JOBS = [
    train,
    f1,
    schedule,
    best,
    resume,
    early_stopping,
    class_weights,
    average,
    contrastive,
    pictures,
    serve,
]

if __name__ == "__main__":
    common.FOLDER.mkdir(exist_ok=True)
    print("result:", {job.__name__: job for job in JOBS}[sys.argv[1]]())
