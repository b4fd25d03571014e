"""One Parquet file with every image once: by one process, by Ray, and when a worker of Ray's is killed."""

from __future__ import annotations

import gzip
import os
import signal
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pyarrow.parquet as pq
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from scipy import stats
from torch import Tensor

import tokenmerge as tm
from tests.helpers import cli
from tokenmerge.data import embedded
from tokenmerge.engine.patch import is_applied

EACH = "ATM(0.98, 0.04, 0.84, batch='each')"
FASHION = Path("/usr/share/datasets/fashion-mnist/t10k-images-idx3-ubyte.gz")


def pictures(folder: Path, pixels: Tensor) -> Path:
    folder.mkdir()
    for i, picture in enumerate(pixels):
        Image.fromarray(picture.numpy()).save(folder / f"{i:05}.png")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 embedded images, one broken file among them."""
    images = embedded.load_images("test", 70)
    x = next(images.batches(70)).images
    pixels = torch.stack([(255 * images.denormalise(image)[0]).round().byte() for image in x])
    images_folder = pictures(tmp_path_factory.mktemp("predict") / "images", pixels)
    (images_folder / "00033x.png").write_bytes(b"broken")
    return images_folder


def predict(images: Path | str, out: Path, model: str = "embedded", batch_size: int = 8, **options: object) -> int:
    return tm.predict(model, images, tm.parse(EACH), out, batch_size=batch_size, **options).images  # type: ignore[arg-type]


def test_labels_of_one_process(folder: Path, tmp_path: Path) -> None:
    done = cli("predict", "embedded", folder, "--out", tmp_path / "p.parquet", "--method", EACH, "--batch-size", "8")
    assert done.returncode == 0, done.stderr
    assert "71 images" in done.stdout
    table = pq.read_table(tmp_path / "p.parquet").to_pydict()
    assert table["path"] == sorted(path.name for path in folder.iterdir())
    broken = table["path"].index("00033x.png")
    assert table["label"][broken] is None
    assert "cannot identify image" in table["error"][broken]
    assert sum(error is not None for error in table["error"]) == 1
    model = tm.apply(embedded.load_model(), tm.parse(EACH))
    with torch.inference_mode():
        expected = model(next(embedded.load_images("test", 70).batches(70)).images).softmax(1).max(1)
    rows = [i for i in range(71) if i != broken]
    assert [table["label"][i] for i in rows] == expected.indices.tolist()
    torch.testing.assert_close(torch.tensor([table["score"][i] for i in rows]), expected.values, atol=1e-5, rtol=0)
    assert list(tmp_path.iterdir()) == [tmp_path / "p.parquet"]


def test_embeddings_from_an_object_store(folder: Path, tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for path in sorted(folder.iterdir())[:9]:
        store.pipe(f"/bucket/{path.name}", path.read_bytes())
    assert predict("memory://bucket", tmp_path / "e.parquet", embeddings=True) == 9
    found = pq.read_table(tmp_path / "e.parquet").to_pydict()
    predict(folder, tmp_path / "f.parquet", embeddings=True, limit=9)
    assert found == pq.read_table(tmp_path / "f.parquet").to_pydict()
    assert len(found["embedding"][0]) == 64
    with pytest.raises(ValueError, match="no images below it"):
        predict("memory://nothing", tmp_path / "n.parquet")
    with pytest.raises(ValueError, match="cannot be listed"):
        predict("nosuchstore://bucket", tmp_path / "n.parquet")


def test_objects_of_this_process(folder: Path, tmp_path: Path) -> None:
    """A model and images in memory give what their names give; the model is not changed."""
    model = embedded.load_model()
    images = tm.load_images(folder, model).take([5, 3, 60])
    assert tm.predict(model, images, tm.parse(EACH), tmp_path / "a.parquet", batch_size=2).images == 3
    rows = pq.read_table(tmp_path / "a.parquet").to_pydict()
    predict(folder, tmp_path / "b.parquet")
    whole = pq.read_table(tmp_path / "b.parquet").to_pydict()
    assert rows["path"] == [whole["path"][i] for i in (5, 3, 60)]
    assert rows["label"] == [whole["label"][i] for i in (5, 3, 60)]
    assert not is_applied(model)
    with pytest.raises(ValueError, match="give both by name"):
        tm.predict(model, images, tm.parse(EACH), tmp_path / "c.parquet", engine="ray")


def test_a_folder_of_the_same_name_is_not_the_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "embedded").mkdir()
    assert predict("embedded", tmp_path / "p.parquet", limit=3) == 3
    with pytest.raises(ValueError, match="weights and options go with a model's name"):
        tm.predict(embedded.load_model(), folder, tm.ToMe(4), tmp_path / "q.parquet", weights="w.safetensors")


def test_bad_input_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), folder.parent / "w.safetensors")
    weights = {"weights": str(folder.parent / "w.safetensors"), "options": {"num_classes": 0}}
    with pytest.raises(ValueError, match="has no classifier; ask for embeddings"):
        predict(folder, tmp_path / "p.parquet", model="test_vit", **weights)
    with pytest.raises(ValueError, match="no such folder to write into"):
        predict(folder, tmp_path / "none" / "p.parquet")
    with pytest.raises(ValueError, match="unknown engine"):
        predict(folder, tmp_path / "p.parquet", engine="spark")

    def stop(what: str, done: int = 1, total: int | None = None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict(folder, tmp_path / "p.parquet", progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def cluster() -> object:
    import ray  # noqa: PLC0415  (seconds, and only these tests need it)

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def kill_one_worker(killed: list[int]) -> None:
    """SIGKILL to the first worker of ours among the processes that this one started."""
    for _ in range(600):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if "ray::" in (name := " ".join(process.cmdline())) and "Worker" in name and not killed:
                    os.kill(process.pid, signal.SIGKILL)
                    killed.append(process.pid)
                    return
        time.sleep(0.05)


@pytest.mark.filterwarnings("ignore")  # Ray and its libraries have their own
def test_ray_is_one_process_also_when_a_worker_is_killed(folder: Path, tmp_path: Path, cluster: object) -> None:
    predict(folder, tmp_path / "here.parquet")
    killed: list[int] = []

    def watch(what: str, done: int = 1, total: int | None = None) -> None:
        if not killed:
            kill_one_worker(killed)

    assert predict(folder, tmp_path / "ray.parquet", engine="ray", workers=2, progress=watch) == 71
    assert len(killed) == 1
    assert pq.read_table(tmp_path / "ray.parquet").equals(pq.read_table(tmp_path / "here.parquet"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ten_thousand_images_and_a_killed_worker(tmp_path: Path, cluster: object) -> None:
    if not FASHION.is_file():
        pytest.skip("Fashion-MNIST is absent; Debian has it as dataset-fashion-mnist")
    raw = gzip.decompress(FASHION.read_bytes())
    _, count, rows, columns = struct.unpack(">4i", raw[:16])
    pixels = torch.frombuffer(bytearray(raw[16:]), dtype=torch.uint8).reshape(count, rows, columns)
    folder = pictures(tmp_path / "images", pixels)
    predict(folder, tmp_path / "here.parquet", batch_size=100)
    killed: list[int] = []
    thread = threading.Thread(target=lambda: (time.sleep(20), kill_one_worker(killed)))
    thread.start()
    assert predict(folder, tmp_path / "ray.parquet", batch_size=100, engine="ray", workers=2) == 10_000
    thread.join()
    table = pq.read_table(tmp_path / "ray.parquet")
    assert len(killed) == 1
    assert table.column("path").to_pylist() == [f"{i:05}.png" for i in range(10_000)]
    assert table.equals(pq.read_table(tmp_path / "here.parquet"))


def test_an_audit_bounds_the_changes_of_this_job(tmp_path: Path) -> None:
    """Against the labels of a second job without merging."""
    method = tm.ToMe(22)
    options: dict[str, Any] = {"limit": 150, "batch_size": 16}
    job = tm.predict("embedded", "embedded", method, tmp_path / "a.parquet", audit=60, **options)
    plain = tm.predict("embedded", "embedded", tm.NoMerge(last_layer="full"), tmp_path / "b.parquet", **options)
    a, b = (pq.read_table(tmp_path / name)["label"].to_pylist() for name in ("a.parquet", "b.parquet"))
    drawn = torch.randperm(150, generator=torch.Generator().manual_seed(0))[:60].tolist()
    unchanged = sum(a[i] == b[i] for i in drawn)
    assert plain.audit is None
    assert job.audit is not None
    assert (job.audit.sample, job.audit.unchanged, job.audit.images) == (60, unchanged, 150)
    assert unchanged < 60, "something should change"
    bad = round((1 - job.audit.bound) * 150)
    assert stats.hypergeom.cdf(60 - unchanged, 150, bad, 60) > 0.05 >= stats.hypergeom.cdf(60 - unchanged, 150, bad + 1, 60)
    assert sum(x == y for x, y in zip(a, b, strict=True)) / 150 >= job.audit.bound
    whole = tm.predict("embedded", "embedded", method, tmp_path / "c.parquet", audit=1000, **options)
    assert whole.audit is not None
    assert whole.audit.bound == sum(x == y for x, y in zip(a, b, strict=True)) / 150, "all of them: no doubt is left"
    assert job.audit.sentence.startswith(
        f"≥ {int(job.audit.bound * 1000) / 10} % of these 150 predictions equal the baseline's"
    )
    with pytest.raises(ValueError, match="an audit compares classes"):
        tm.predict("embedded", "embedded", method, tmp_path / "d.parquet", embeddings=True, audit=5)


def test_an_audit_passes_over_what_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    done = cli("predict", "embedded", folder, "--out", tmp_path / "a.parquet", "--method", EACH, "--audit", 100)
    assert done.returncode == 0, done.stderr
    readable = pq.read_table(tmp_path / "a.parquet")["label"].drop_null()
    assert f"of these {len(readable)} predictions equal the baseline's" in done.stdout
