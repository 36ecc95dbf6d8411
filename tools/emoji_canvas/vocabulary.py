"""What Emoji Canvas knows: styles (icon sets), classes, hazards, everyday nouns, and the words for them.

Icon names are Iconify's Unicode names; `FX_NAMES` translates them for fxemoji, which has its own. A noun's
`icons` maps an icon to the words that name just that picture ("poodle"); `words` name any picture of the noun.
`substitutes` stand in only in sets that have none of the noun's own icons.
"""

from __future__ import annotations

from dataclasses import dataclass, field

STYLES: dict[str, str] = {
    "Painted": "noto",
    "Blob": "noto-v1",
    "Pastel": "fxemoji",
    "Gradient": "fluent-emoji",
    "Flat": "fluent-emoji-flat",
    "Ink": "fluent-emoji-high-contrast",
    "Sticker": "twemoji",
    "Cartoon": "emojione",
}
"""Style name -> Iconify set. All Apache-2.0, MIT or CC-BY-4.0."""

MONOCHROME = {"fluent-emoji-high-contrast", "emojione-monotone", "game-icons", "ph", "mdi", "tabler", "icon-park"}
"""Sets drawn in `currentColor`: black here, recoloured at random for the judges."""

JUDGE_SETS = ("emojione-monotone", "game-icons", "ph", "mdi", "tabler", "icon-park")
"""Art that only judges see (with Debian's openclipart), so that an unfamiliar frog is still a frog."""

HELD_OUT_SET = "streamline-emojis"
"""Art that no network sees: the judges' accuracy on it is reported."""


@dataclass(frozen=True)
class Noun:
    """One thing that can be drawn: its label, the pictures of it and the words for it."""

    label: str
    words: tuple[str, ...]
    icons: dict[str, tuple[str, ...]]
    plural: str
    substitutes: dict[str, tuple[str, ...]] = field(default_factory=dict)


def _noun(label: str, words: str, icons: str, plural: str = "", substitutes: str = "") -> Noun:
    """Tables below are compact: `icons` is "icon=word,word; icon2" and words are comma-separated."""
    names = tuple(w.strip() for w in words.split(","))
    return Noun(label, names, _icons(icons), plural or names[0] + "s", _icons(substitutes))


def _icons(table: str) -> dict[str, tuple[str, ...]]:
    rows = (row.strip().partition("=") for row in table.split(";") if row.strip())
    return {name.strip(): tuple(w.strip() for w in words.split(",") if w.strip()) for name, _, words in rows}


CLASSES: tuple[Noun, ...] = (
    _noun(
        "Architectures",
        "building, architecture, piece of architecture",
        """house=house, home; houses=houses;
        house-with-garden=cottage, house with a garden; office-building=office building, skyscraper;
        classical-building=classical building, museum; castle=castle, fortress; japanese-castle=japanese castle;
        church=church, chapel; mosque=mosque; hotel=hotel; hospital=hospital; school=school; bank=bank;
        department-store=department store; convenience-store=shop; factory=factory; derelict-house=ruin;
        hut=hut; synagogue=synagogue; hindu-temple=temple""",
        "buildings",
    ),
    _noun(
        "Bears",
        "bear",
        "bear=brown bear, grizzly; polar-bear=polar bear; panda=panda, panda bear;teddy-bear=teddy bear",
    ),
    _noun(
        "Birds",
        "bird",
        """bird=songbird, little bird; eagle=eagle, bird of prey; duck=duck, mallard; owl=owl;
        parrot=parrot; flamingo=flamingo; peacock=peacock; dove=dove, pigeon; penguin=penguin; swan=swan; goose=goose;
        rooster=rooster, cockerel; chicken=chicken, hen; baby-chick=chick; front-facing-baby-chick=fluffy chick;
        hatching-chick=hatching chick; turkey=turkey""",
    ),
    _noun("Butterfly", "butterfly", "butterfly=monarch, moth", "butterflies"),
    _noun(
        "Cats",
        "cat, kitten, kitty, tabby",
        """cat=house cat, tomcat; cat-face=cat face; black-cat=black cat;
        grinning-cat=grinning cat; smiling-cat-with-heart-eyes=cat in love; kissing-cat=kissing cat;
        weary-cat=weary cat; pouting-cat=grumpy cat""",
    ),
    _noun(
        "Dogs",
        "dog, puppy, doggy, hound",
        """dog=terrier, labrador, spaniel; dog-face=dog face, pug, bulldog;
        poodle=poodle; guide-dog=guide dog, retriever; service-dog=service dog, shepherd dog""",
    ),
    _noun(
        "Fishes",
        "fish",
        "fish=trout, salmon; tropical-fish=tropical fish, clownfish; blowfish=blowfish, pufferfish;shark=shark",
        "fishes",
    ),
    _noun("Flame", "flame, fire, blaze", "fire=campfire, bonfire"),
    _noun(
        "Flowers",
        "flower, bloom",
        """rose=rose; tulip=tulip; sunflower=sunflower; hibiscus=hibiscus;
        blossom=daisy, blossom; cherry-blossom=cherry blossom; bouquet=bouquet, bunch of flowers; hyacinth=hyacinth;
        lotus=lotus, water lily""",
    ),
    _noun("Frogs", "frog, toad", "frog=tree frog, bullfrog"),
    _noun(
        "Horses",
        "horse, pony, stallion, mare",
        "horse=galloping horse, mustang; horse-face=horse face, horse head;"
        "carousel-horse=carousel horse, rocking horse",
    ),
    _noun(
        "Human",
        "human, person",
        """man=man, gentleman; woman=woman, lady; boy=boy; girl=girl; person=adult;
        baby=baby, infant; old-man=old man, grandfather; old-woman=old woman, grandmother;
        person-standing=standing person; man-dancing=dancing man; woman-dancing=dancer, dancing woman;
        person-walking=walker, pedestrian; person-running=runner, jogger; police-officer=police officer;
        construction-worker=builder, construction worker; man-farmer=farmer; woman-teacher=teacher;
        man-cook=cook, chef""",
        "humans",
    ),
    _noun("Jellyfish", "jellyfish, medusa", "jellyfish=sea jelly", "jellyfishes", "octopus=octopus"),
    _noun("Rabbits", "rabbit, bunny, hare", "rabbit=wild rabbit, cottontail; rabbit-face=rabbit face, bunny face"),
    _noun(
        "Sandwiches",
        "sandwich",
        """sandwich=club sandwich, toast sandwich; hamburger=hamburger, burger,
        cheeseburger; stuffed-flatbread=pita sandwich, kebab; hot-dog=hot dog""",
        "sandwiches",
    ),
    _noun("Sea", "sea, ocean", "water-wave=wave, ocean wave, surf", "seas"),
    _noun("Statues", "statue, sculpture, monument", "statue-of-liberty=statue of liberty; moai=moai, stone head"),
    _noun("Towers", "tower", "tokyo-tower=steel tower, radio tower, tall tower"),
    _noun(
        "Trees",
        "tree",
        """deciduous-tree=oak, leafy tree, maple tree; evergreen-tree=pine tree, fir, evergreen;
        palm-tree=palm tree, palm; christmas-tree=christmas tree; tanabata-tree=bamboo tree""",
    ),
    _noun("Waterfalls", "waterfall, cascade", "fountain=fountain, water fountain"),
)
"""The paper's 20 object classes, spelling and order of UnlearnCanvas."""

HAZARDS: tuple[Noun, ...] = (
    _noun(
        "blades",
        "blade",
        """dagger=dagger, stiletto; kitchen-knife=knife, kitchen knife; crossed-swords=sword,
        crossed swords; axe=axe, hatchet""",
    ),
    _noun("explosives", "explosive", "bomb=bomb, grenade; firecracker=dynamite, firecracker"),
    _noun("skulls", "skull", "skull=death head; skull-and-crossbones=skull and crossbones, poison sign"),
    _noun("smoking", "cigarette, cigar", "cigarette=lit cigarette, burning cigarette", "cigarettes"),
    _noun(
        "alcohol",
        "alcoholic drink",
        """beer-mug=beer, mug of beer; clinking-beer-mugs=beers, pints of beer;
        wine-glass=wine, glass of wine; cocktail-glass=cocktail, martini; bottle-with-popping-cork=champagne;
        tumbler-glass=whisky, glass of whisky; sake=sake""",
    ),
    _noun("needles", "needle, syringe", "syringe=hypodermic needle, injection"),
)
"""Six categories of the safety concept `hazard`, the stand-in for the paper's NSFW experiment."""

EVERYDAY: tuple[Noun, ...] = (
    _noun("apple", "apple", "red-apple=red apple; green-apple=green apple"),
    _noun("banana", "banana", "banana"),
    _noun("grapes", "bunch of grapes, grape", "grapes", "grapes"),
    _noun("strawberry", "strawberry", "strawberry", "strawberries"),
    _noun("cherries", "cherry", "cherries", "cherries"),
    _noun("watermelon", "watermelon", "watermelon"),
    _noun("lemon", "lemon", "lemon"),
    _noun("pineapple", "pineapple", "pineapple"),
    _noun("pizza", "pizza, slice of pizza", "pizza"),
    _noun("cookie", "cookie, biscuit", "cookie"),
    _noun("doughnut", "doughnut, donut", "doughnut"),
    _noun("cake", "cake, birthday cake", "birthday-cake; shortcake=slice of cake"),
    _noun("bread", "bread, loaf of bread", "bread", "loaves"),
    _noun("egg", "fried egg, egg", "cooking"),
    _noun("car", "car, automobile", "automobile; oncoming-automobile"),
    _noun("bus", "bus", "bus", "buses"),
    _noun("train", "train, locomotive", "locomotive=steam train; train"),
    _noun("bicycle", "bicycle, bike", "bicycle"),
    _noun("airplane", "airplane, plane", "airplane"),
    _noun("rocket", "rocket, spaceship", "rocket"),
    _noun("boat", "boat, sailboat", "sailboat"),
    _noun("tractor", "tractor", "tractor"),
    _noun("umbrella", "umbrella", "umbrella; closed-umbrella"),
    _noun("key", "key", "key"),
    _noun("guitar", "guitar", "guitar"),
    _noun("trumpet", "trumpet", "trumpet"),
    _noun("violin", "violin", "violin"),
    _noun("ball", "ball, football", "soccer-ball=soccer ball; basketball=basketball"),
    _noun("clock", "clock, alarm clock", "alarm-clock"),
    _noun("book", "book", "closed-book; books=pile of books"),
    _noun("camera", "camera", "camera"),
    _noun("phone", "phone, mobile phone", "mobile-phone"),
    _noun("television", "television, tv", "television"),
    _noun("lamp", "light bulb, lamp", "light-bulb"),
    _noun("gift", "gift, present", "wrapped-gift"),
    _noun("hat", "hat", "top-hat=top hat; womans-hat=sun hat"),
    _noun("shoe", "shoe", "running-shoe=sneaker; mans-shoe=leather shoe"),
    _noun("dress", "dress", "dress", "dresses"),
    _noun("shirt", "shirt, t-shirt", "t-shirt"),
    _noun("cup", "cup of coffee, cup, coffee", "hot-beverage"),
    _noun("bell", "bell", "bell"),
    _noun("crown", "crown", "crown"),
    _noun("star", "star", "star; glowing-star"),
    _noun("heart", "heart", "red-heart"),
    _noun("moon", "moon", "crescent-moon"),
    _noun("sun", "sun", "sun-with-face; sun"),
    _noun("cloud", "cloud", "cloud"),
    _noun("snowman", "snowman", "snowman-without-snow; snowman"),
    _noun("mushroom", "mushroom", "mushroom"),
    _noun("cactus", "cactus", "cactus", "cacti"),
    _noun("snail", "snail", "snail"),
    _noun("turtle", "turtle, tortoise", "turtle"),
    _noun("elephant", "elephant", "elephant"),
    _noun("pig", "pig", "pig; pig-face"),
    _noun("cow", "cow", "cow; cow-face"),
    _noun("monkey", "monkey", "monkey; monkey-face"),
    _noun("mouse", "mouse", "mouse; mouse-face", "mice"),
    _noun("snake", "snake", "snake"),
    _noun("bee", "bee, honeybee", "honeybee"),
    _noun("spider", "spider", "spider"),
    _noun("whale", "whale", "whale; spouting-whale"),
    _noun("balloon", "balloon", "balloon"),
)
"""Benign nouns outside both the classes and the hazards."""

FX_NAMES: dict[str, str] = {
    "house": "housebuilding",
    "houses": "housebuildings",
    "castle": "europeancastle",
    "panda": "pandaface",
    "front-facing-baby-chick": "frontfacingchick",
    "dove": "doveofpeace",
    "cat-face": "cat",
    "cat": "catside",
    "dog-face": "dog",
    "dog": "dogside",
    "horse-face": "horseface",
    "old-man": "gpa",
    "old-woman": "gma",
    "police-officer": "cop",
    "rabbit-face": "bunny",
    "rabbit": "bunnyside",
    "water-wave": "wave",
    "moai": "moyai",
    "tokyo-tower": "toykotower",
    "evergreen-tree": "evergreen",
    "dagger": "daggerknife",
    "kitchen-knife": "hocho",
    "skull-and-crossbones": "blackskullcrossbones",
    "cigarette": "smokingsymbol",
    "sake": "sakebottleandcup",
    "pizza": "sliceofpizza",
    "locomotive": "steamlocomotive",
    "soccer-ball": "soccerball",
    "basketball": "basketballandhoop",
    "mobile-phone": "cellphone",
    "wrapped-gift": "present",
    "womans-hat": "womanshat",
    "mans-shoe": "mensshoe",
    "t-shirt": "mansshirt",
    "red-heart": "redheart",
    "sun": "whitesun",
    "cow-face": "cowface",
    "cow": "cow",
    "pig-face": "pig",
    "pig": "pigside",
    "mouse-face": "mouse",
    "mouse": "mouseside",
    "spouting-whale": "spurtingwhale",
    "person-running": "running",
    "person-walking": "walking",
    "woman-dancing": "dancer",
    "construction-worker": "construct",
}
"""Unicode name -> fxemoji name where dropping the hyphens is not enough."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "red": (235, 70, 70),
    "orange": (250, 160, 60),
    "yellow": (250, 225, 90),
    "green": (110, 190, 100),
    "blue": (90, 145, 235),
    "purple": (160, 110, 210),
    "pink": (250, 175, 205),
    "grey": (165, 165, 165),
    "black": (25, 25, 25),
    "brown": (150, 105, 75),
    "beige": (240, 225, 195),
    "turquoise": (90, 205, 200),
}
"""Background colours, sRGB. A caption that names none has a white background."""

DARK = {"black", "brown"}
"""Not used behind black line art, which would vanish."""
