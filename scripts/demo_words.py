"""The words and facts of the demo model's corpus; `demo_corpus.py` puts them into sentences."""

# ruff: noqa: SIM905
# Words in a row are easier to read and to change than lists of quoted words.

LISTS = {
    ("colors", "colours"): "red orange yellow green blue purple pink brown black white gray gold",
    ("days", "days of the week"): "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    ("months", "months of the year"): "January February March April May June July August September October November"
    " December",
    ("seasons",): "spring summer autumn winter",
    ("numbers", "number words"): "one two three four five six seven eight nine ten eleven twelve",
    ("letters", "letters of the alphabet"): "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    ("animals", "farm animals"): "cat dog horse cow pig sheep goat duck hen rabbit mouse donkey",
    ("wild animals",): "lion tiger elephant giraffe zebra monkey bear wolf fox deer",
    ("birds",): "eagle owl crow swan robin parrot pigeon stork",
    ("insects",): "ant bee fly wasp beetle moth butterfly cricket",
    ("fruits", "fruit"): "apple banana cherry pear plum grape lemon peach melon mango kiwi fig",
    ("vegetables",): "carrot potato onion tomato pepper cabbage bean pea corn pumpkin",
    ("drinks",): "water milk tea coffee juice lemonade",
    ("trees",): "oak pine birch maple willow cedar elm ash",
    ("flowers",): "rose tulip daisy lily violet poppy sunflower",
    ("planets",): "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
    ("continents",): "Africa Asia Europe America Australia Antarctica",
    ("countries",): "France Spain Italy Germany Poland Greece Norway Sweden Japan China India Egypt",
    ("cities",): "Paris London Rome Berlin Madrid Vienna Athens Oslo Tokyo Cairo",
    ("shapes",): "circle square triangle rectangle oval star heart diamond",
    ("tools",): "hammer saw screwdriver drill wrench shovel rake axe",
    ("clothes",): "shirt trousers dress coat hat scarf gloves socks shoes",
    ("vehicles",): "car bus train truck bicycle boat ship plane",
    ("rooms",): "kitchen bedroom bathroom hall cellar attic",
    ("instruments", "musical instruments"): "piano guitar violin flute drum trumpet harp",
    ("sports",): "football tennis swimming running cycling skiing hockey golf",
    ("foods",): "bread cheese butter soup rice noodles pancakes salad",
    ("furniture", "pieces of furniture"): "table chair sofa bed shelf cupboard desk wardrobe",
    ("relatives",): "mother father sister brother grandmother grandfather aunt uncle cousin",
    ("parts of the body",): "head neck shoulder arm hand finger chest leg knee foot",
    ("languages",): "English French Spanish German Italian Greek Polish Arabic Chinese Japanese",
    ("school subjects",): "reading writing mathematics history geography music painting science",
    ("feelings",): "joy sadness anger fear surprise pride",
    ("metals",): "iron copper silver tin lead zinc nickel",
}
"""Names of a category (the first is the usual one) -> its items in their canonical order."""

COUNT_WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}

GIRLS = "Mila Anna Lily Rosa Nora Emma Ida Zoe Clara Ruby Alice Grace".split()
BOYS = "Tom Ben Max Leo Sam Otto Finn Jack Hugo Oscar Paul Felix".split()
CITIES = "Paris London Rome Berlin Madrid Vienna Athens Oslo Tokyo Cairo Lisbon Dublin Prague Warsaw Delhi Lima".split()
LIKES = "apples plums pears cherries books songs games cakes stories puzzles stamps shells kites maps".split()
PETS = "cat dog rabbit parrot pony turtle hamster goldfish".split()

SPECIES = (
    "fox bear rabbit mouse cat dog wolf hedgehog squirrel badger frog turtle goose pony lamb dragon robot giant wizard "
    "king queen pirate knight clown"
).split()
OBJECTS = (
    "kite ball hat drum lamp boat bell book coat ring flute basket lantern key scarf whistle crown map spoon kettle "
    "ladder mirror blanket bicycle"
).split()
TRAITS = "little brave kind clever young happy shy lazy funny quiet gentle proud".split()
SHADES = "red blue green yellow white black golden silver shiny tiny big wooden".split()
PLACES = "forest village valley meadow castle garden town cave harbour mill desert farm".split()
SPOTS = "the old bridge|the tall tree|the deep river|the stone wall|the market|the church|the big rock|the well".split(
    "|"
)
HELPERS = (
    "an old farmer|a kind baker|a friendly shepherd|a tired sailor|a young teacher|a busy tailor|a wise fisherman|"
    "a merry miller"
).split("|")
WEATHER = "sunny rainy windy snowy cold warm cloudy foggy".split()

CAPITALS = {
    "France": "Paris", "England": "London", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid",
    "Austria": "Vienna", "Greece": "Athens", "Norway": "Oslo", "Japan": "Tokyo", "Egypt": "Cairo",
    "Portugal": "Lisbon", "Ireland": "Dublin", "Poland": "Warsaw", "India": "Delhi", "Peru": "Lima",
    "Sweden": "Stockholm", "Denmark": "Copenhagen", "Finland": "Helsinki", "China": "Beijing", "Russia": "Moscow",
    "Hungary": "Budapest", "Cuba": "Havana", "Kenya": "Nairobi", "Canada": "Ottawa", "Belgium": "Brussels",
}  # fmt: skip
COLORS_OF_THINGS = {
    "the sky": "blue", "the sea": "blue", "the grass": "green", "a leaf": "green", "the sun": "yellow",
    "a lemon": "yellow", "a banana": "yellow", "snow": "white", "milk": "white", "a swan": "white", "coal": "black",
    "the night": "black", "a crow": "black", "blood": "red", "a tomato": "red", "a cherry": "red", "a carrot": "orange",
    "a pumpkin": "orange", "chocolate": "brown", "a pig": "pink", "a frog": "green", "an elephant": "gray",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "tall": "short", "fast": "slow", "old": "young", "happy": "sad", "day": "night",
    "up": "down", "left": "right", "open": "closed", "wet": "dry", "full": "empty", "light": "dark", "hard": "soft",
    "early": "late", "loud": "quiet", "rich": "poor", "strong": "weak", "clean": "dirty", "near": "far",
}  # fmt: skip
YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb", "hen": "chick", "pig": "piglet",
    "duck": "duckling", "bear": "cub", "goat": "kid", "frog": "tadpole", "deer": "fawn",
}  # fmt: skip
SOUNDS = {
    "dog": "barks", "cat": "meows", "cow": "moos", "horse": "neighs", "sheep": "bleats", "pig": "grunts",
    "duck": "quacks", "lion": "roars", "bee": "buzzes", "wolf": "howls", "mouse": "squeaks", "snake": "hisses",
}  # fmt: skip
LEGS = {
    "dog": "four", "cat": "four", "horse": "four", "cow": "four", "hen": "two", "duck": "two", "swan": "two",
    "spider": "eight", "ant": "six", "bee": "six", "snake": "zero", "fish": "zero",
}  # fmt: skip
MADE_BY = {
    "baker": "bread", "tailor": "clothes", "shoemaker": "shoes", "painter": "pictures", "cook": "soup",
    "carpenter": "tables", "potter": "pots", "writer": "books", "bee": "honey", "hen": "eggs", "spider": "webs",
    "poet": "poems",
}  # fmt: skip

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()

RELATIONS: dict[str, tuple[str, str, dict[str, str]]] = {
    "capital": ("What is the capital of {}?", "The capital of {} is", CAPITALS),
    "color": ("What color is {}?", "The color of {} is", COLORS_OF_THINGS),
    "opposite": ("What is the opposite of {}?", "The opposite of {} is", OPPOSITES),
    "young": ("What is a young {} called?", "A young {} is called a", YOUNG),
    "sound": ("What does a {} do when it is loud?", "When it is loud, a {}", SOUNDS),
    "legs": ("How many legs has a {}?", "The number of legs of a {} is", LEGS),
    "made by": ("What does a {} make?", "The work of a {} is to make", MADE_BY),
    "day after": (
        "Which day comes after {}?",
        "The day after {} is",
        dict(zip(DAYS, DAYS[1:] + DAYS[:1], strict=True)),
    ),
    "month after": (
        "Which month comes after {}?",
        "The month after {} is",
        dict(zip(MONTHS, MONTHS[1:] + MONTHS[:1], strict=True)),
    ),
}
"""Name -> the question, the beginning of the statement, and subject -> answer."""
