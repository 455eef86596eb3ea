"""Pictures up to the vision tower's door: decoding, resize plan, patches, span layout. Pillow and numpy, no torch.

Knows nothing of URLs, prompts or weights; `model/vision.py` turns `ProcessedImage.patches` into features.
"""

from kvist.images.decode import FORMATS, ImageLimits, decode_image
from kvist.images.errors import ImageError
from kvist.images.patches import ProcessedImage, preprocess
from kvist.images.plan import END, IMAGE, NEWLINE, START, TEXT, ImagePlan, plan_image, span_types

__all__ = [
    "END",
    "FORMATS",
    "IMAGE",
    "NEWLINE",
    "START",
    "TEXT",
    "ImageError",
    "ImageLimits",
    "ImagePlan",
    "ProcessedImage",
    "decode_image",
    "plan_image",
    "preprocess",
    "span_types",
]
