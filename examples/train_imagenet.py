"""ImageNet-style training that continues in the middle of an epoch after failures and with other numbers of workers.

    elastic-agent --standalone --nproc-per-node=gpu --max-restarts=3 train_imagenet.py --data /data/imagenet/train
    elastic-agent --standalone --nproc-per-node=2 --max-restarts=3 train_imagenet.py --images 512

With --data it reads a folder with one folder of images for each class, and trains a ResNet-50; this needs torchvision.
Without, it trains a small network on random images, to try it out.

It uses three calls of the agent's Python package: TorchElastic's sampler, which continues in the middle of an epoch, also
when the number of workers changes; a commit of each checkpoint, after which all later rounds begin with it; and a report
of progress, which `elasticctl describe` shows. With several nodes, --folder must be one that all of them see. Or each
node has its own (--own-disks), and the worker that is furthest hands its state to all, as in TorchElastic's recipe.
"""

import argparse
import os
import pathlib

import elastic_agent
import elastic_agent.torch as elastic
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def images_and_model(options):
    """What is trained on, and what is trained."""
    if options.data is None:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(options.images, 3, 32, 32, generator=generator)
        classes = torch.randint(10, (options.images,), generator=generator)
        small = [torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten()]
        return TensorDataset(images, classes), torch.nn.Sequential(*small, torch.nn.Linear(128, 10))
    from torchvision import datasets, models, transforms

    normalized = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalized]
    images = datasets.ImageFolder(options.data, transforms.Compose(steps))
    return images, models.resnet50(num_classes=len(images.classes))


def newest_in(folder):
    """The newest checkpoint of this node's own, if it has one."""
    files = sorted(pathlib.Path(folder).glob("step-*.pt"), key=lambda path: int(path.stem[len("step-") :]))
    return torch.load(files[-1], map_location="cpu") if files else None


@record  # Tells the agent why a worker failed.
def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", help="a folder of images [default: random images]")
    arguments.add_argument("--images", type=int, default=4096, help="how many random images")
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--batch", type=int, default=32, help="images a worker takes for a step")
    arguments.add_argument("--readers", type=int, default=0, help="processes of each worker that read images")
    arguments.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    arguments.add_argument("--folder", default="checkpoints", help="where checkpoints are")
    arguments.add_argument("--own-disks", action="store_true", help="each node has a --folder of its own")
    options = arguments.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    images, model = images_and_model(options)
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    # Each worker takes equally many steps: where an epoch does not divide by their number, some samples come twice.
    sampler = elastic_agent.ElasticDistributedSampler(images)
    step, saved = 0, None

    if options.own_disks:
        saved = newest_in(options.folder)
        step, saved = elastic.share_furthest(saved["step"] if saved else 0, saved)
    # The newest checkpoint that was committed: all members of a round get the same one.
    elif committed := elastic_agent.assignment()["checkpoint"]:
        step, saved = committed["step"], torch.load(committed["path"], map_location=device)
    if saved:
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sampler.load_state_dict(saved["sampler"])
        if rank == 0:
            print(f"continues after step {step}, {dist.get_world_size()} workers", flush=True)

    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)
        for pixels, classes in DataLoader(images, batch_size=options.batch, sampler=sampler, num_workers=options.readers):
            loss = torch.nn.functional.cross_entropy(model(pixels.to(device)), classes.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            sampler.advance(len(classes))
            elastic_agent.report_progress(step, epoch=epoch, loss=loss.item())
            writer = int(os.environ["LOCAL_RANK"]) if options.own_disks else rank
            if writer == 0 and step % options.save_every == 0:
                os.makedirs(options.folder, exist_ok=True)
                path = os.path.abspath(os.path.join(options.folder, f"step-{step}.pt"))
                parts = {"model": model.module, "optimizer": optimizer, "sampler": sampler}
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save({"step": step, **states}, path + ".part")
                os.replace(path + ".part", path)
                if not options.own_disks:
                    elastic_agent.commit_checkpoint(step, path)
            if rank == 0 and step % options.save_every == 0:
                print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
