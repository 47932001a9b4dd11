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
_MASSES = """
lemonade oil vinegar syrup honey sugar salt flour rice pasta butter cheese cream yogurt meat beef pork tuna oatmeal
dough batter broth sauce paint ink glue soap shampoo detergent gas gasoline petrol diesel fuel coal wood lumber iron
steel copper sand gravel soil dirt mulch clay cement concrete snow rain air oxygen hydrogen nitrogen carbon helium acid
alcohol mixture alloy money cash fabric wool cotton silk cardboard work time land grass hay wheat feed food trash
garbage laundry luggage furniture clothing data memory storage
"""
_WITH = """
different distinct possible real whole total red yellow green blue purple pink brown black white gray grey golden big
large small little tiny tall long new old young good bad broken ripe rotten fresh dry wet hot cold male female left
remaining additional extra identical regular gold silver plastic wooden metal ice jelly soccer tennis playing trading
golf bowling high middle elementary vanilla math science history english even odd positive ordered lattice correct
right acute obtuse equilateral isosceles rational
"""
_FOREIGN = """
apfel äpfel birne birnen stück stücke mensch menschen person personen kind kinder schüler schülerin schülerinnen
junge jungen mädchen mann männer frau frauen leute tier tiere buch bücher auto autos tag tage tagen stunde stunden
woche wochen monat monate monaten jahr jahre jahren minute minuten sekunde sekunden meter euro möglichkeit
möglichkeiten punkt punkte seite seiten kugel kugeln karte karten ei eier grad
mela mele pera pere persona persone uomo uomini donna donne bambino bambini ragazzo ragazzi studente studenti animale
animali libro libri giorno giorni ora ore settimana settimane mese mesi anno anni modo modi soluzione soluzioni punto
punti lato lati carta carte uovo uova grado gradi metro metri
appel appels peer peren mens mensen man mannen vrouw vrouwen kind kinderen leerling leerlingen dier dieren boek boeken
dag dagen uur uren week weken maand maanden jaar jaren manier manieren punt punten kaart kaarten graden
jabłko jabłka jabłek osoba osoby osób człowiek ludzi dziecko dzieci uczeń uczniów dzień dni godzina godziny godzin
tydzień tygodnie tygodni miesiąc miesiące miesięcy rok lata lat sposób sposoby sposobów złoty złote złotych
яблоко яблока яблок груша груши груш человек человека людей ребёнок ребенок детей мальчик мальчика мальчиков девочка
девочки девочек ученик ученика учеников книга книги книг день дня дней час часа часов минута минуты минут секунда
секунды секунд неделя недели недель месяц месяца месяцев год года лет способ способа способов рубль рубля рублей
метр метра метров штука штуки штук решение решения решений точка точки точек
elma kişi gün saat öğrenci kitap
人 個 个 名 位 只 隻 頭 头 匹 本 冊 册 張 张 枚 台 輛 辆 天 日 日間 年 年間 月 個月 个月 か月 週間 周 星期 小時 小时
時間 分 分鐘 分钟 秒 秒間 歳 岁 歲 円 元 块 塊 圆 美元 歐元 欧元 米 公里 千米 厘米 克 公斤 千克 升 度 通り 种 種 種類
种类 種方法 种方法 次 回 條 条 支 件 朵 棵 顆 颗 杯 瓶 道 題 题 組 组 班 頁 页 명 개 마리 권 장 대 일 년 개월 주 시간
분 초 살 원 가지 번 점 쪽 사람
"""
_PLURAL_IN_S = """
pomme poire personne homme femme enfant garçon fille élève étudiant étudiante gens animal animaux livre voiture jour
heure semaine mois an ans année façon manière possibilité solution point côté boule bille carte œuf œufs degré mètre
manzana pera persona hombre mujer niño niña alumno alumna estudiante animales libro coche día hora semana mes meses
año manera forma posibilidad posibilidades solución soluciones punto lado bola carta huevo grado metro minuto segundo
maçã pessoa homem homens mulher mulheres criança aluno estudante livro carro dia semana mês mese ano maneira solução
soluções ponto lado bola carta ovo grau
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
_BEFORE = _HEADS | frozenset(_WITH.split())
_ANY = _BEFORE | frozenset(_MASSES.split())
_OTHER_LANGUAGES = frozenset(_FOREIGN.split()) | {w + s for w in _PLURAL_IN_S.split() for s in ("", "s")}
"""Beside French, Spanish and Portuguese every form is listed, and no ending is taken off: ``tiers`` are thirds, not
animals."""


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
    """True for one noun in singular or plural; words before it may be left out (``red balls`` and ``balls``)."""
    ours, theirs = one.casefold().split(), other.casefold().split()
    shorter = min(len(ours), len(theirs))
    return bool(stems(ours[-1]) & stems(theirs[-1])) and ours[-shorter:-1] == theirs[-shorter:-1]


def is_counted(phrase: str) -> bool:
    """True for a noun of the list, in singular or plural, with nouns, colours and the like before it."""
    *before, noun = phrase.split()
    if not before and noun.casefold() in _OTHER_LANGUAGES:
        return True
    return not stems(noun).isdisjoint(_HEADS) and not any(stems(word).isdisjoint(_BEFORE) for word in before)


def is_substance(phrase: str) -> bool:
    """True for what a measure or a piece may be of: ``of water``, ``of pizza``, ``of red wine``."""
    return not any(stems(word).isdisjoint(_ANY) for word in phrase.split())
