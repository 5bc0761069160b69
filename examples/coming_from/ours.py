"""The same script for offbeat: offbeat run -n 2 --sync ssp:3 ours.py OUT."""

import copy
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

import offbeat as ob

EPOCHS, BATCH, PATIENCE = 6, 32, 3
OUT = Path(sys.argv[1])


class Digits(Dataset):
    """8x8 digits; those to train on are shifted by a pixel now and then."""

    def __init__(self, images, labels, augment):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            shift = torch.randint(-1, 2, (2,)).tolist()
            image = torch.roll(image, shift, dims=(0, 1))
        return image, self.labels[index]


def collate(samples):
    images, labels = zip(*samples, strict=True)
    return (torch.stack(images)[:, None] - 4.9) / 6.0, torch.stack(labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class Average:
    """An exponential moving average of a model."""

    def __init__(self, model, decay=0.9):
        self.model, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        own, new = self.model.state_dict(), model.state_dict()
        for name, value in own.items():
            if value.is_floating_point():
                value.lerp_(new[name], 1 - self.decay)

    def state_dict(self):
        return self.model.state_dict()

    def load_state_dict(self, state):
        self.model.load_state_dict(state)


@torch.no_grad()
def accuracy(model, loader):
    training = model.training
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train(training)
    return right / len(loader.dataset)


def main(run):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.tensor(digits.images[order], dtype=torch.float32)
    labels = torch.tensor(digits.target[order])
    train, test = (
        Digits(images[360:], labels[360:], True),
        Digits(images[:360], labels[:360], False),
    )
    test_loader = DataLoader(test, 360, collate_fn=collate)
    loader = DataLoader(train, BATCH, shuffle=True, collate_fn=collate, drop_last=True)
    model = run.replica(Net())
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = run.optimizer(torch.optim.AdamW(groups, lr=1e-3))
    scheduler = run.scheduler(OneCycleLR(optimizer, 1e-2, total_steps=EPOCHS * len(loader)))
    average, best = Average(model), {"accuracy": 0.0, "epoch": -1}
    run.state(average=average, best=best)
    batches = run.batches(loader, epochs=EPOCHS)
    for epoch in batches.epochs():
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            average.update(model)
        if run.rank:
            continue
        score = accuracy(average.model, test_loader)
        if score > best["accuracy"]:
            best.update(accuracy=score, epoch=epoch)
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {score:.4f}")
        if epoch - best["epoch"] >= PATIENCE:
            run.stop()
    if run.rank == 0:
        print(f"best {best['accuracy']:.4f} in epoch {best['epoch']}")


if __name__ == "__main__":
    with ob.join(out=OUT, resume=True) as run:
        main(run)
