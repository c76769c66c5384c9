"""The tree as one picture: columns are the steps of the window and the leaves, edges coloured by advantage."""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont

from .tree import Tree

MARGIN, COLUMN, GAP = 16, 120, 6
BACKGROUND, INK, NEUTRAL = (24, 26, 31), (226, 228, 233), (110, 114, 124)
GOOD, BAD = (70, 190, 110), (225, 85, 75)


def draw_tree(tree: Tree, prompt: int = 0, thumbnail: int = 56) -> Image.Image:
    """Picture of the trees of one prompt: RGB, as high as its leaves need.

    Green edges have a positive advantage, red a negative one, the more saturated the larger; grey: no advantage yet.
    """
    small = max(14, min(thumbnail, 3200 // tree.plan.leaves))
    row = small + GAP
    font, title_font = ImageFont.load_default(13), ImageFont.load_default(15)
    columns = len(tree.plan.branching) + 1
    top = MARGIN + 58
    width = 2 * MARGIN + columns * COLUMN + small + 90
    image = Image.new("RGB", (width, top + row * tree.plan.leaves + MARGIN), BACKGROUND)
    draw = ImageDraw.Draw(image)
    draw.text((MARGIN, MARGIN - 4), _title(tree, prompt), INK, title_font)
    for column, step in enumerate(tree.plan.stochastic_steps):
        label = f"step {step}\nsigma {tree.sigmas[step]:.2f}"
        draw.text((MARGIN + column * COLUMN, top - 38), label, NEUTRAL, font)
    draw.text((MARGIN + (columns - 1) * COLUMN, top - 22), "leaves", NEUTRAL, font)

    heights = _node_heights(tree, top, row)
    for column in range(columns - 1):
        _draw_edges(draw, tree, prompt, column, heights)
    for column, nodes in enumerate(heights[:-1]):
        for y in nodes:
            x = MARGIN + column * COLUMN + 8
            draw.ellipse((x - 4, y - 4, x + 4, y + 4), INK)
    _draw_leaves(image, draw, tree, prompt, heights[-1], small, font)
    return image


def _title(tree: Tree, prompt: int) -> str:
    title = f"update {tree.iteration}: {tree.prompts[prompt]}"
    return title if len(title) <= 70 else title[:67] + "..."


def _node_heights(tree: Tree, top: int, row: int) -> list[list[float]]:
    """Vertical centre of every node of every level, roots first, leaves last: a parent sits amid its children."""
    heights = [[top + row * (leaf + 0.5) for leaf in range(tree.plan.leaves)]]
    for k in reversed(tree.plan.branching):
        below = heights[0]
        heights.insert(0, [sum(below[n * k : n * k + k]) / k for n in range(len(below) // k)])
    return heights


def _draw_edges(draw: ImageDraw.ImageDraw, tree: Tree, prompt: int, column: int, heights: list[list[float]]) -> None:
    k = tree.plan.branching[column]
    values = tree.advantages[column][:, prompt].tolist() if tree.advantages else None
    for child, y in enumerate(heights[column + 1]):
        start = (MARGIN + column * COLUMN + 8, heights[column][child // k])
        end = (MARGIN + (column + 1) * COLUMN + (8 if column + 2 < len(heights) else 0), y)
        draw.line((start, end), _colour(values[child]) if values else NEUTRAL, 3)


def _colour(advantage: float) -> tuple[int, int, int]:
    strength = min(1.0, abs(advantage) / 1.5)
    target = GOOD if advantage > 0 else BAD
    red, green, blue = (round(grey + (full - grey) * strength) for grey, full in zip((70, 73, 82), target, strict=True))
    return red, green, blue


def _draw_leaves(
    image: Image.Image,
    draw: ImageDraw.ImageDraw,
    tree: Tree,
    prompt: int,
    heights: list[float],
    small: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    x = MARGIN + (len(tree.plan.branching)) * COLUMN
    pictures = tree.growth.thumbnails
    rewards = tree.rewards.total[:, prompt] if tree.rewards else None
    best = int(tree.rewards.best(1)[0, prompt]) if tree.rewards and any(tree.rewards.weights) else -1
    for leaf, y in enumerate(heights):
        if pictures is not None:
            picture = Image.fromarray(pictures[leaf, prompt].numpy())
            picture = picture.resize((small, round(small * picture.height / picture.width)))
            image.paste(picture, (x, round(y - picture.height / 2)))
        if rewards is not None:
            colour = GOOD if leaf == best else INK
            draw.text(
                (x + small + 8, y - 8), f"{float(rewards[leaf]):.4g}" + (" best" if leaf == best else ""), colour, font
            )
