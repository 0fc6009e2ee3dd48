"""Augmentation: a function of the sample and its key alone, and the right one."""

import numpy as np
import pytest
from support.image_files import digits, in_colour

from hvdtrain.data import Augmented, Crop, Flip, RandomResizedCrop
from hvdtrain.data.datasets import fetch
from hvdtrain.data.order import sample_keys

COUNT = 400
IMAGES, LABELS = in_colour(digits()[0][:COUNT], side=16), digits()[1][:COUNT]
KEYS = sample_keys(np.arange(COUNT), 0, 0)
ALL = np.arange(COUNT)
TRANSFORMS = {"crop": Crop(2), "flip": Flip(), "random-resized crop": RandomResizedCrop((16, 16))}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_sample_is_changed_alike_in_any_batch(name):
    transform = TRANSFORMS[name]
    whole = transform(IMAGES, KEYS)
    assert (whole.shape, whole.dtype) == (IMAGES.shape, np.uint8)
    assert (whole != IMAGES).any()
    chosen = np.array([7, 300, 7, 12])
    np.testing.assert_array_equal(transform(IMAGES[chosen], KEYS[chosen]), whole[chosen])
    assert (transform(IMAGES, sample_keys(ALL, 0, 1)) != whole).any()


def test_a_crop_is_a_part_of_the_padded_image_and_all_places_come_up():
    found, places = Crop(2)(IMAGES, KEYS), set()
    padded = np.pad(IMAGES, ((0, 0), (2, 2), (2, 2), (0, 0)))
    for image, wide in zip(found, padded, strict=True):
        fits = [(y, x) for y in range(5) for x in range(5) if (wide[y : y + 16, x : x + 16] == image).all()]
        assert fits
        places.update(fits)
    assert len(places) == 25


def test_a_random_resized_crop_takes_parts_of_the_areas_and_aspects_that_are_asked_for():
    choose = RandomResizedCrop((16, 16), scale=(0.25, 1), ratio=(0.5, 2)).boxes(KEYS)
    boxes = np.array([choose(place, 100, 60) for place in range(COUNT)])
    assert (boxes >= 0).all()
    assert (boxes <= (100, 60, 100, 60)).all()
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, aspect = width * height / 6000, width / height
    assert 0.24 < area.min() < 0.3
    assert 0.85 < area.max() <= 1
    assert (aspect > 0.48).all()
    assert (aspect < 2.1).all()
    assert len(np.unique(boxes, axis=0)) > 0.95 * COUNT


def test_any_data_set_can_be_augmented_and_only_its_images_are():
    plain = {"inputs": IMAGES, "targets": LABELS, "more": np.arange(COUNT)}
    data = Augmented(plain, [Crop(2), Flip()])
    np.testing.assert_array_equal(fetch(data, ALL)["inputs"], IMAGES)
    found = fetch(data, ALL, KEYS)
    np.testing.assert_array_equal(found["targets"], LABELS)
    np.testing.assert_array_equal(found["more"], plain["more"])
    assert (found["inputs"] != IMAGES).any(axis=(1, 2, 3)).mean() > 0.5
    items = Augmented(list(zip(IMAGES, LABELS, strict=True)), [Crop(2), Flip()])
    np.testing.assert_array_equal(fetch(items, ALL, KEYS)["inputs"], found["inputs"])
