"""Classes of images on every layout against one process, and rows of images that are refused by name."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.load import check_data
from shardwise.checkpoint.manifest import Manifest
from shardwise.data.file_rows import FileRow, row_hashes
from shardwise.data.images import open_images, read_image
from shardwise.data.prepare import prepare
from shardwise.errors import CheckpointError, ConfigError, DataError, LegalityError, ModelError
from shardwise.job.schema import Job
from shardwise.plan.plan import World, resolve
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.toy_inputs import toy_of_files
from shardwise.testing.toy_towers import PATCH, SIDE
from shardwise.testing.world import WorldPool
from shardwise.training.setup import study
from tests.parity.image_files import CLASSES, PROCESSOR, SIZE, write_folders
from tests.parity.jobs import check_agrees

ORIENTATION = 0x0112  # the tag of EXIF
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 2, replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "vit": {"image_size": SIZE, "patch_size": 4},
    "swin": {"image_size": SIZE, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4],
             "window_size": 2, "drop_path_rate": 0.0},
    "convnext": {"image_size": SIZE, "patch_size": 2, "num_stages": 2, "hidden_sizes": [8, 16], "depths": [2, 2]},
}  # fmt: skip


def image_job(path: Path, family: str = "vit", **sections: Any) -> Job:
    """Return a job of image classification on a directory or a file of rows."""
    base: dict[str, Any] = {
        "model": {
            "config": toy_config(family, **CONFIGS[family]), "task": "image_classification", "labels": list(CLASSES),
            "attention": "eager",
        },
        "data": {"path": str(path), "processor": PROCESSOR},
        "training": {"steps": 2, "sequences_per_step": 4, "microbatch_size": 1},
        "precision": {"compute": "fp64"}, "parallel": {"device": "cpu"},
    }  # fmt: skip
    return Job.model_validate({**base, **{name: base.get(name, {}) | keys for name, keys in sections.items()}})


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_verify_agrees(world_pool: WorldPool, tmp_path: Path, family: str, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    check_agrees(world_pool, ranks, image_job(write_folders(tmp_path / "images"), family, parallel=parallel))


@pytest.mark.slow
def test_what_a_processor_makes_beside_pixels_reaches_the_model(world_pool: WorldPool, tmp_path: Path) -> None:
    """SigLIP 2 takes patches with a mask, and how many there are in each direction."""
    patches = {"image_processor_type": "Siglip2ImageProcessor", "patch_size": PATCH, "max_num_patches": SIDE**2}
    config, _ = toy_of_files("image_classification", "siglip2")
    images = write_folders(tmp_path / "images")
    job = image_job(
        images, model={"config": config}, data={"processor": patches}, parallel={"sharded_data_parallel_degree": 2}
    )
    check_agrees(world_pool, 2, job)


@pytest.mark.parametrize("model_type", ["imagegpt", "shieldgemma2"])
def test_models_that_take_tokens_are_refused(tmp_path: Path, model_type: str) -> None:
    job = image_job(write_folders(tmp_path / "images"), model={"config": {"model_type": model_type}})
    with pytest.raises(ModelError, match=f"{model_type}.* takes input_ids.*model.factory"):
        study(job)


def rows_file(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    """Write rows beside the images; two right ones come first."""
    write_folders(tmp_path, 1)
    right = [{"image": "cat/0.png", "label": 0}, {"image": "dog/0.png", "label": "dog"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in [*right, *rows]))
    return tmp_path / "rows.jsonl"


def test_rows_hold_names_or_numbers_of_classes(tmp_path: Path) -> None:
    data = prepare(image_job(rows_file(tmp_path, {"image": "owl/0.png", "label": 2})))
    labels = [int(split.sample(n)["labels"]) for split in (data.train, data.validation) for n in range(len(split))]
    assert sorted(labels) == [0, 1, 2]
    assert data.train.sample(0)["pixel_values"].shape == (3, SIZE, SIZE)


def made_rows() -> list[dict[str, Any]]:
    return [{"image": f"{name}/0.png", "label": name} for name in CLASSES]


def test_paths_of_made_rows_start_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_folders(tmp_path, 1))
    data = {"path": f"{__name__}:made_rows", "cache_directory": str(tmp_path / "cache")}
    assert len(prepare(image_job(tmp_path, data=data)).train) == len(CLASSES) - 1


def test_a_row_is_held_out_by_all_that_it_holds(tmp_path: Path) -> None:
    """A function of data.filter reads every column: Parquet has times, which JSON has not."""
    columns: dict[str, Any] = {"image": "ü.png", "label": 1, "none": None, "list": [1.5, {"b": 1, "a": True}]}
    rows = [columns, *({**columns, "at": at} for at in (datetime(2026, 1, 2), datetime(2026, 1, 3)))]
    hashes = row_hashes([FileRow("f, row 1", tmp_path, row) for row in rows]).tolist()
    assert hashes[0] == 1804876747620607170 and len(set(hashes)) == len(rows)
    with pytest.raises(DataError, match=r"f, row 2: a column holds object, .*; leave that column out"):
        row_hashes([FileRow("f, row 2", tmp_path, {**columns, "at": object()})])


def test_a_checkpoint_goes_on_with_the_same_rows_alone(tmp_path: Path) -> None:
    """A row stands in a split by its columns: with another label or name it may change from one to the other."""
    path = rows_file(tmp_path, {"image": "owl/0.png", "label": 2})
    lines, moved = path.read_text().splitlines(), tmp_path / "moved"
    shutil.copytree(tmp_path, moved)
    wrote = prepare(image_job(path)).describe()
    for other in (lines[::-1], [*lines[:2], json.dumps({"image": "owl/0.png", "label": 1})]):
        path.write_text("\n".join(other))
        with pytest.raises(CheckpointError, match="was trained on other data"):
            check_data(Manifest.model_construct(data=wrote), prepare(image_job(path)).describe(), "step-00000002")
    check_data(Manifest.model_construct(data=wrote), prepare(image_job(moved / path.name)).describe(), "step-00000002")


@pytest.mark.parametrize(
    "row, says",
    [
        ({"image": "cat/9.png", "label": 0}, r"rows.jsonl, line 3: image='cat/9.png' is no file"),
        ({"image": "cat/0.png", "label": 3}, r"line 3: label=3 is none of the 3 classes .* Numbers are 0 to 2"),
        ({"image": "cat/0.png", "label": "dgo"}, r"line 3: label='dgo' is none .* Did you mean 'dog'\?"),
        ({"label": 0}, r"line 3: no column 'image'"),
        ({"image": [1, 2], "label": 0}, r"line 3: image holds \[1, 2\]; give the path of a file"),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        prepare(image_job(rows_file(tmp_path, row)))


def folder_rows(job: Job) -> list[str]:
    rows, _ = open_images(job, None)
    return [f"{row.columns['image']} {row.columns['label']}" for row in rows]


def test_folders_of_images_are_read_as_any_directory(tmp_path: Path) -> None:
    """Links are followed, hidden files left out."""
    images = write_folders(tmp_path / "images", 1)
    (images / "dog").rename(tmp_path / "elsewhere")
    (images / "dog").symlink_to(tmp_path / "elsewhere")
    (images / "cat" / ".copies").mkdir()
    for copy in (".1.png", ".copies/0.png"):
        (images / "cat" / copy).write_bytes((images / "cat" / "0.png").read_bytes())
    assert folder_rows(image_job(images)) == ["cat/0.png cat", "dog/0.png dog", "owl/0.png owl"]
    with pytest.raises(ConfigError, match=r"images/\*' with data.format=image_folder is no directory; give the one"):
        folder_rows(image_job(images / "*"))


def test_a_filter_of_folders_of_images_is_refused(tmp_path: Path) -> None:
    job = image_job(write_folders(tmp_path / "images", 1), data={"filter": {"label": "cat"}})
    with pytest.raises(ConfigError, match=r"filter=\{'label': 'cat'\} .*=image_folder: .* leave data.filter out"):
        prepare(job)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    (write_folders(tmp_path / "images") / "cat" / "1.png").write_bytes(b"no image")
    data = prepare(image_job(tmp_path / "images"))
    with pytest.raises(DataError, match=r"cat/1.png cannot be read as an image"):
        for split in (data.train, data.validation):
            for number in range(len(split)):
                split.sample(number)


def test_images_are_turned_as_cameras_say(tmp_path: Path) -> None:
    """What a viewer shows upright is read so: EXIF's orientation 6 lies on its right side."""
    from PIL import Image

    upright = Image.new("RGB", (2, 3), "blue")
    upright.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "photo.png", exif=exif)
    assert list(read_image(tmp_path / "photo.png", "f").getdata()) == list(upright.getdata())


def test_values_of_16_bits_are_refused(tmp_path: Path) -> None:
    """Pillow cuts them at 255, so that nearly all of the image would be white."""
    from PIL import Image

    Image.new("I;16", (2, 2), 1000).save(tmp_path / "scan.png")
    with pytest.raises(DataError, match=r"f: .*scan.png has values of more than 8 bits .*I;16.*; write it again in 8"):
        read_image(tmp_path / "scan.png", "f")


@pytest.mark.parametrize("path, says", [(None, "holds stdlib"), ("notes.txt", "holds text")])
def test_other_data_is_refused(tmp_path: Path, path: str | None, says: str) -> None:
    (tmp_path / "notes.txt").write_text("no images")
    job = image_job(tmp_path, data={"path": path and str(tmp_path / path)})
    with pytest.raises(ConfigError, match=says):
        prepare(job)


def test_whole_images_are_not_shared_by_context_ranks(tmp_path: Path) -> None:
    job = image_job(write_folders(tmp_path / "images"), parallel={"context_parallel_degree": 2})
    with pytest.raises(LegalityError, match="a head of classes reads whole sequences"):
        resolve(job, World(2, "cpu", 2), study(job))
