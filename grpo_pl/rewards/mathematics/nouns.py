"""The nouns that may follow a number without changing it, as they occur in problems for schools and competitions."""

from __future__ import annotations

from functools import lru_cache

_COUNTED = """
apple orange banana pear peach plum cherry grape lemon lime melon watermelon mango kiwi berry strawberry blueberry
raspberry blackberry cranberry coconut pineapple apricot fig date avocado fruit vegetable potato tomato carrot onion
cucumber pumpkin pepper cabbage radish bean pea corn mushroom olive nut peanut almond walnut cashew egg cookie cake
cupcake pie muffin donut doughnut brownie pancake waffle pastry croissant bagel bun bread loaf sandwich burger
hamburger hotdog pizza taco burrito sausage steak candy candies chocolate sweet lollipop gumball gumdrop marshmallow
jellybean caramel treat snack cracker chip pretzel popcorn cereal salad soup meal breakfast lunch dinner dish course
dessert drink beverage soda juice coffee tea milk milkshake water wine beer bottle can jar jug pitcher mug glass bowl
plate tray fork spoon knife pan pot kettle serving slice scoop bite sip drop grain seed crumb piece part portion share
bar stick cone sundae sack bag box crate carton packet pack package bundle bunch basket bucket barrel bin container
case chest drawer envelope parcel tank tub tube roll reel sheet stack pile heap row column line aisle level floor
story storey layer shelf rack person human individual man woman child kid baby toddler infant boy girl teen
teenager adult senior student pupil scholar learner teacher professor instructor tutor principal coach trainer player
athlete runner swimmer skater dancer singer musician drummer guitarist pianist actor artist painter writer author poet
reader editor journalist reporter doctor nurse dentist patient surgeon vet pharmacist scientist engineer programmer
developer mathematician lawyer judge juror witness officer soldier sailor pilot captain driver passenger traveler
traveller tourist visitor guest host hostess waiter waitress chef cook baker butcher farmer gardener fisherman hunter
miner carpenter plumber electrician mechanic builder worker employee employer boss manager director clerk cashier
salesperson customer client buyer seller shopper merchant dealer owner tenant resident citizen neighbor neighbour
villager voter candidate member leader friend classmate teammate roommate partner colleague parent mother father mom
dad son daughter brother sister sibling cousin uncle aunt nephew niece grandparent grandmother grandfather grandchild
husband wife relative ancestor descendant family household king queen prince princess knight wizard pirate monk nun
priest thief prisoner guard ghost alien monster dragon unicorn robot participant contestant competitor applicant
attendee volunteer spectator viewer subscriber follower user respondent girlfriend boyfriend graduate freshman
sophomore junior survivor liar truthteller fan camper scout team club class classroom group crew band troop party gang
committee company firm business organization department league conference tribe nation country state province county
city town village community animal pet dog puppy cat kitten horse pony donkey mule cow bull calf ox sheep lamb goat
pig piglet hog chicken hen rooster chick duck duckling goose gosling turkey swan bird parrot pigeon dove eagle hawk
owl crow sparrow penguin flamingo ostrich rabbit bunny hamster mouse rat squirrel fox wolf bear cub deer moose elk
elephant giraffe zebra lion tiger leopard cheetah monkey ape gorilla camel kangaroo koala panda hippo rhino fish
goldfish shark whale dolphin seal octopus squid crab lobster shrimp oyster clam snail slug worm spider insect bug ant
bee wasp beetle ladybug butterfly moth caterpillar fly mosquito grasshopper cricket snake lizard turtle tortoise frog
toad tadpole crocodile alligator dinosaur cattle cell bacterium virus amoeba species tree bush shrub plant flower rose
tulip daisy lily sunflower daffodil orchid petal leaf branch log twig root stem flowerbed garden field farm orchard
park forest lawn hill mountain valley river lake pond pool ocean island beach rock stone pebble shell brick block tile
plank board beam pole post rod pipe wire cable rope string ribbon chain link knot nail screw bolt hammer wrench saw
drill tool ladder house home apartment flat building hotel room bedroom bathroom kitchen office school college
university library hospital church museum theater theatre cinema restaurant cafe store shop market mall bank factory
warehouse station airport stadium gym tower castle bridge tunnel road street path trail sidewalk gate fence wall door
window roof stair step elevator desk table chair seat bench couch sofa bed pillow blanket towel curtain rug carpet
lamp light bulb candle match mirror clock watch calendar camera radio television tv computer laptop tablet phone
telephone monitor keyboard printer screen battery machine device gadget engine motor wheel tire tyre gear car
automobile truck lorry van bus taxi cab train tram wagon carriage trailer bike bicycle tricycle motorcycle scooter
skateboard boat ship canoe kayak raft yacht submarine plane airplane helicopter rocket satellite spaceship planet moon
star galaxy vehicle book notebook textbook novel magazine newspaper comic dictionary chapter page paragraph sentence
word letter character syllable vowel consonant digit verse poem song album record tape video movie film episode show
concert game puzzle toy doll ball balloon basketball football baseball marble die dice domino card deck token coin
penny pence nickel dime banknote bill note check cheque stamp sticker poster picture photo photograph painting drawing
portrait sketch frame pen pencil crayon marker eraser ruler paintbrush brush pin needle button bead thread yarn cloth
shirt blouse sweater coat jacket suit dress skirt pant trouser jean short sock shoe boot sandal slipper sneaker hat
cap glove mitten scarf tie belt necklace bracelet ring earring jewel gem diamond ruby pearl crystal medal trophy prize
award gift present souvenir ticket coupon voucher receipt badge flag sign label tag key lock purse wallet suitcase
backpack umbrella tent costume uniform outfit day night morning afternoon evening weekday weekend birthday anniversary
holiday vacation season shift period round turn lap race trip journey ride flight visit tour drive walk meeting lesson
lecture session test quiz exam assignment homework project task job chore order delivery purchase sale payment
installment deposit loan subscription membership appointment interview call message email text comment vote poll
survey question answer response problem exercise example mistake error attempt try trial experiment chance toss flip
throw shot goal hit run point mark grade credit stage win loss draw defeat victory move way method choice option
possibility outcome event scenario solution value number integer divisor factor multiple prime term coefficient
variable constant parameter equation inequality expression formula function polynomial monomial sequence series set
subset element object item thing entity combination permutation arrangement ordering selection sample partition
distribution coloring colouring pattern design configuration strategy tournament pairing handshake route triangle
square rectangle rhombus parallelogram trapezoid trapezium kite quadrilateral pentagon hexagon heptagon octagon
nonagon decagon polygon circle ellipse semicircle arc sector chord diameter radius tangent secant parabola hyperbola
curve segment ray region area side edge vertex corner angle diagonal face cube cuboid sphere hemisphere cylinder prism
pyramid tetrahedron octahedron polyhedron solid figure shape intersection intercept asymptote maximum minimum extremum
symmetry axis median altitude bisector grid graph node cycle loop matrix vector dimension isomorphism subgroup color
colour size type kind sort flavor flavour topping ingredient style model brand version category account file folder
program app website click download like view atom molecule ion electron proton neutron photon particle bond isotope
gene allele chromosome acorn arrow axe bandage barn bell bow bookcase bookmark bookshelf bracket bubble cage cart
cartridge cactus clover collection cord countertop cottage crown dart dumbbell dumpling feather fireworks firework
flashlight fossil gallery hairpin helmet instrument keychain lantern leg arm hand finger toe head eye ear nose mouth
tooth foot wing tail horn hoof paw heart bone muscle magnet map mask mat medicine pill vitamin dose necktie net napkin
oar paddle pad paperclip paper paperback peg piano guitar violin drum flute trumpet pinecone pincushion rake rattle
sail scale seashell sculpture statue shovel sled snowball snowflake snowman spot stall stool stripe swing teacup
teapot teabag thimble toothbrush toothpick tractor trinket tripod vase vest wand whistle wick wreath zoo inning
quarterback touchdown penalty foul rebound assist kick serve hole hurdle jump pushup situp squat lunge rep stroke
pull-up push-up sit-up worksheet workbook handout flyer pamphlet brochure postcard newsletter bushel vial flask beaker
canister keg
"""
_IRREGULAR = {
    "people": "person", "children": "child", "grandchildren": "grandchild", "mice": "mouse", "geese": "goose",
    "feet": "foot", "teeth": "tooth", "oxen": "ox", "leaves": "leaf", "knives": "knife", "wolves": "wolf",
    "calves": "calf", "loaves": "loaf", "shelves": "shelf", "wives": "wife", "scarves": "scarf", "thieves": "thief",
    "elves": "elf", "hooves": "hoof", "dice": "die", "vertices": "vertex", "matrices": "matrix", "indices": "index",
    "axes": "axis", "radii": "radius", "foci": "focus", "maxima": "maximum", "minima": "minimum",
    "extrema": "extremum", "bacteria": "bacterium", "viruses": "virus", "polyhedra": "polyhedron",
    "tetrahedra": "tetrahedron", "cacti": "cactus", "pence": "penny", "formulae": "formula",
    "bookshelves": "bookshelf", "octahedra": "octahedron",
}  # fmt: skip
_HEADS = frozenset(_COUNTED.split())
_GROUP_NAMES = """
pair couple duo duet trio triplet twin quartet quintet sextet septet octet dozen score gross brace handful
"""
_GROUPS = frozenset(_GROUP_NAMES.split())


@lru_cache(maxsize=4096)
def stems(noun: str) -> frozenset[str]:
    """The possible singulars of ``noun``, in lower case: ``days`` gives ``days`` and ``day``."""
    noun = noun.casefold()
    found = {noun}
    if noun in _IRREGULAR:
        found.add(_IRREGULAR[noun])
    if noun.endswith("men"):
        found.add(noun[:-3] + "man")
    if noun.endswith("ies") and len(noun) > 4:
        found.add(noun[:-3] + "y")
    if noun.endswith("es") and len(noun) > 4:
        found.add(noun[:-2])
    if noun.endswith("s") and not noun.endswith("ss") and len(noun) > 3:
        found.add(noun[:-1])
    return frozenset(found)


def singular(noun: str) -> str:
    """One spelling for a noun in singular and plural."""
    return min(stems(noun), key=lambda stem: (len(stem), stem))


def same_noun(one: str, other: str) -> bool:
    """True for one noun in singular or plural; words before it may be left out (``red balls`` and ``balls``) but for
    groups (``pair balls``)."""
    ours, theirs = one.casefold().split(), other.casefold().split()
    shorter = min(len(ours), len(theirs))
    if any(map(_is_group, (*ours[:-shorter], *theirs[:-shorter]))):
        return False
    return bool(stems(ours[-1]) & stems(theirs[-1])) and ours[-shorter:-1] == theirs[-shorter:-1]


def is_counted(phrase: str) -> bool:
    """True for a noun of the list, in singular or plural, whatever stands before it (``red balls``) but for groups
    (``pair balls``)."""
    *before, last = phrase.split()
    return not stems(last).isdisjoint(_HEADS) and not any(map(_is_group, before))


def _is_group(word: str) -> bool:
    return not stems(word.split("-")[-1]).isdisjoint(_GROUPS)
