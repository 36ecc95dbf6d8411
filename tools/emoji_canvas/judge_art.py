"""Which pictures of the judge-only and held-out sets show which class or hazard.

Patterns are full-match regular expressions on icon names (or openclipart paths). The lists were made by eye.
"""

# ruff: noqa: E501 - tables read better unbroken
from __future__ import annotations

ICONIFY: dict[str, str] = {
    "Architectures": "house|house-with-garden|houses|family-house|block-house|castle|byzantin-temple|greek-temple|"
    "egyptian-temple|church|viking-church|church-one|church-two|bank|classical-building|office-building|buildings?|"
    "building-(apartment|castle|church|cottage|community|mosque|skyscraper|fortress|hospital|one|two|three)|"
    "house-(line|simple)|home|home-variant|castle-turret|temple-(buddhist|hindu)|hospital-building|japanese-castle",
    "Bears": "bear-face|bear-head|bear|polar-bear|panda-face|panda|teddy-bear|koala-bear",
    "Birds": "bird|bird-[12]|barn-owl|owl|duck|eagle|eagle-head|eagle-emblem|kiwi-bird|seagull|plastic-duck|chicken|rooster|"
    "baby-chick|front-facing-baby-chick|hatching-chick(-1)?|penguin(-[12])?|dove|turkey|flamingo|parrot-head|hummingbird|"
    "swan|raven|sparrow|chicken|toucan",
    "Butterfly": "butterfly|butterfly-(outline)|monarch-butterfly",
    "Cats": "cat|cat-face|hollow-cat|grinning-cat-face|smiling-cat-face-with-heart-eyes|kissing-cat-face|weary-cat-face|"
    "pouting-cat-face|crying-cat-face|schrodingers-cat-alive|grinning-cat-face-with-smiling-eyes",
    "Dogs": "dog|dog-face|dog-side|dog-service|poodle|jumping-dog|sitting-dog|sniffing-dog|labrador-head|dog-zodiac",
    "Fishes": "fish|fish-simple|fish-one|tropical-fish|blowfish|shark|double-fish|circling-fish|angler-fish|salmon",
    "Flame": "fire|flame|fire-simple|fire-two|small-fire|fluffy-flame|campfire|celebration-fire|fire-silhouette",
    "Flowers": "flower|flower-(lotus|tulip|poppy|emblem|twirl)|flowers|rose|tulip|sunflower(-[12])?|hibiscus|blossom|bouquet|"
    "cherry-blossom|lotus-flower|lotus|dandelion-flower|cotton-flower|daisy|vanilla-flower|spoted-flower|twirly-flower|"
    "white-flower|geometric-flowers",
    "Frogs": "frog|frog-face|paper-frog|frog-prince",
    "Horses": "horse|horse-face|horse-head|carousel-horse|horse-zodiac|rocking-horse|trojan-horse|horse-toy|unicorn-face",
    "Human": "man(-[12])?|woman(-[12])?|boy(-[123])?|girl(-[123])?|baby(-[123])?|old-man(-[12])?|old-woman(-[12])?|person|human|"
    "human-(male|female|child|greeting|handsup|handsdown)|person-(simple|arms-spread|simple-walk|simple-run|walking|running)|"
    "face-(man|woman)|man-(dancing|walking|running|farmer|cook)(-[12])?|woman-(dancing|walking|teacher|cook)(-[12])?|"
    "police-officer|construction-worker|quick-man|vitruvian-man|strong-man",
    "Jellyfish": "jellyfish|octopus|giant-squid|squid",
    "Rabbits": "rabbit|rabbit-face|rabbit-head|rabbit-zodiac",
    "Sandwiches": "sandwich|sandwich-one|hamburger(-[123])?|burger|hot-dog|food-hot-dog|hamburger-menu-food",
    "Sea": "water-wave|waves?|big-wave|wave-crest|at-sea|waves-(left|right)",
    "Statues": "statue-of-liberty|moai|colombian-statue|stone-bust|easter-island|statue|primitive-totem",
    "Towers": "tokyo-tower|pisa-tower|tower-of-pisa|tower|white-tower|tv-tower|radio-tower|evil-tower|eiffel-tower|"
    "building-eiffel-tower|transmission-tower|lighthouse|light-house|signal-tower|clock-tower|building-broadcast-tower|"
    "tower-flag|guarded-tower|stone-tower",
    "Trees": "tree|trees|tree-(evergreen|palm|one|two)|pine-tree|palm-tree|palm|christmas-tree(-one)?|deciduous-tree|"
    "evergreen-tree|coconut-tree|fruit-tree|birch-trees|willow-tree|tanabata-tree|bonsai-tree|oak",
    "Waterfalls": "waterfall|fountain|water-fountain|waterfalls-[hv]|bamboo-fountain",
    "blades": "dagger|kitchen-knife|crossed-swords|sword|knife|bowie-knife|axe|battered-axe|broadsword|plain-dagger|"
    "daggers|katana|machete|stiletto|switchblade|swords|knife-military|battle-axe|knife-fork",
    "explosives": "bomb|dynamite|grenade|time-bomb|rolling-bomb|unlit-bomb|molotov|bombing-run",
    "skulls": "skull|skull-and-crossbones|skull-crossbones|crowned-skull|death-skull|skull-crack|skull-scan|human-skull",
    "smoking": "cigarette|cigar|smoking|cigarettes?",
    "alcohol": "beer-mug|clinking-beer-mugs|wine-glass|cocktail-glass|bottle-with-popping-cork|beer-stein|beer-bottle|"
    "wine-bottle|martini|wine|glass-(wine|cocktail|mug-variant)|beer|bottle-wine|(red|white)-wine-glass|"
    "champagne-glass-[12]|clinking-glasses-[1-5]|tumbler-glass|glass-celebration|pint|cocktail|champagne",
    "needles": "syringe|needle|vaccine|hypodermic-test",
}

OPENCLIPART: dict[str, str] = {
    "Architectures": r"buildings/homes/(?!lighthouse).*|buildings/church.*|.*castle_-_rpg.*",
    "Bears": r"animals/mammals/bears/.*",
    "Birds": r"animals/birds/(acquila|aquila|baby|bird_of|cigno|cormorant|crow|dove|duck|eagle|emperor|flamand|gabbiano|"
    r"gallo|gufo|gull|hen|jonathon|new_penguin|owl|pollo|puffin|rooster|seagull|tacchino|uccello).*|animals/birds/penguin/.*",
    "Butterfly": r"animals/bugs/(butterfly|farfalla).*",
    "Cats": r"animals/mammals/(cartoon_cat|housecats/).*",
    "Dogs": r"animals/mammals/(dog_0|dog_on|dogs/).*",
    "Fishes": r"animals/fish/(altum|arctic|bofish|brown|clown|giraffe|pescetto|yellow).*",
    "Flame": r"signs_and_symbols/flame_jon.*|recreation/party/fire_valessio.*",
    "Flowers": r"plants/flowers/(?!cactus|cartoon).*",
    "Frogs": r"animals/(rana0?\d?_|red-eye_frog).*|animals/amphibian/(?!2_dead).*",
    "Horses": r"animals/mammals/horses/.*",
    "Human": r"people/stickmen/.*",
    "Rabbits": r"animals/mammals/(bunny|coniglio).*",
    "Sandwiches": r"food/(submarine_sandwich|sandwich_one).*|food/meats_and_eggs/.*burger.*",
    "Towers": r"buildings/eiffel.*|buildings/water_tower.*|buildings/homes/lighthouse.*",
    "Trees": r"plants/trees/(cartoon_tree|christmas_tree|evergreen|fall_coloured_tree|palmtree|tree_).*|plants/trees/evergreen/.*",
    "blades": r"tools/weapons/(katana|knife|longsword|spider_sword|sword).*",
    "explosives": r"tools/weapons/(bomb|kallisti).*",
    "skulls": r"signs_and_symbols/skull.*|people/skull.*|signs_and_symbols/hazard/cute_skull.*",
    "alcohol": r"food/beverages/alcohol/.*",
}

OTHER_ICONIFY = (
    "car|automobile|bus|train|bicycle|bike|airplane|rocket|sailboat|umbrella|key|guitar|trumpet|violin|ball|clock|book|"
    "camera|phone|television|lamp|gift|hat|shoe|dress|shirt|t-shirt|cup|bell|crown|star|heart|moon|sun|cloud|snowman|"
    "mushroom|cactus|snail|turtle|elephant|pig|cow|monkey|mouse|snake|bee|spider|whale|balloon|apple|banana|grapes|"
    "strawberry|pizza|cookie|doughnut|cake|bread|egg|lemon|carrot|cherry|cherries|tractor|anchor|scissors|pencil|chair|"
    "table|tent|globe|trophy|hammer|wrench|magnet|microscope|telescope|drum|piano|dice|backpack|glasses|crab|bat|fox-face|"
    "lion-face|tiger|tiger-face|wolf-face|camel|goat|sheep|ram|dolphin|koala|gorilla|crocodile|lizard|scorpion|ant|"
    "chess-king|ladder|candle|light-bulb|wheel|gear|robot|ghost|alien|feather|leaf|maple-leaf|clover|corn|tomato|peach|pear"
)
"""Pictures of other things, for the judges' label `other`."""

OTHER_OPENCLIPART = (
    r"transportation/vehicles/.*|food/(fruit|vegetables|desserts)/.*|recreation/(music|toys)/.*|people/clothing/.*|"
    r"animals/mammals/(elef|elephant|dolphin|monkey|camel|contour_(elephant|giraffe|kangaroo|fox|camel)|goat|pig|rhino|"
    r"a_simple_pig|sheep|deer|bat).*|animals/bugs/(bee|ladybug|fly|coccinell|spider).*|electronics/bulb/.*"
)
