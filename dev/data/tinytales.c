/* tinytales.c -- writes the embedded data set: short stories for children, made from a grammar by counter-based random
 * numbers, so that every machine gets the same bytes without a download.
 *
 *   tinytales [--stories N] [--seed S] [--text] [-o FILE]
 *
 * Output: one {"text": "..."} a line and story, or with --text plain text with an empty line between stories.
 *
 * A story is a plot, one row of the plot's table (what is lost, feared, built ...), a cast and a season. The cast keeps its
 * names, kinds and pronouns through the story: that, and cause and effect inside a plot, is what there is to learn beyond
 * spelling. A plot is a list of paragraphs in a small template language:
 *
 *   [a|b|c]   one of these, with equal chance; may be nested; [a|] is "a or nothing"
 *   {key}     a fact of this story (the row's fields, the cast below), or else a line of the list of that name; a list does
 *             not give the same line twice in one story while it has others
 *   {a key}   the same with "a" or "an" in front, as its first sound asks
 *   ^         the next letter is a capital. Sentences get theirs by themselves; only after !" and ?" it has to be said
 *   ?         in front of a paragraph: half of the stories leave it out
 *
 *   H he him his hand kid     the hero, "hand" or "paw", and "girl", "boy" or the animal
 *   F fhe fhim fhis fhand     the friend: "Pip the hedgehog" or "Tom from next door" at first, "Pip" from then on; or
 *                             {fkid}: "a hedgehog named Pip"
 *   M mhe mhim mhis           someone met on the way: "an old turtle" at first, "the old turtle" from then on
 *   P phe phim phis           someone grown up at home: "Grandma"
 *   intro home trait          the hero in one phrase, where, and a sentence about the hero
 *   season weather sky        the time of the year, an adjective and a sentence for it
 *   barrier way               what bars the road, and what somebody wise does about it
 */
#include "../../llmc/utils.h"
#include "../../llmc/rand.h"

enum { MAX_STORY = 1 << 14, MAX_FACTS = 64, MAX_FACT = 512, MAX_DEPTH = 16, MAX_LINES = 32, DEFAULT_STORIES = 6000 };

// clang-format off
// ---------------------------------------------------------------------------------------------------------------------
// the cast

typedef struct { const char* name; char gender; } Name;  // a name keeps its gender, so that it can be learned

static const Name child_names[] = {
    {"Lily", 'f'}, {"Mia", 'f'}, {"Anna", 'f'}, {"Rosa", 'f'}, {"Nora", 'f'}, {"Ella", 'f'}, {"Zoe", 'f'}, {"Clara", 'f'},
    {"Maya", 'f'}, {"Ruby", 'f'}, {"Emma", 'f'}, {"Lucy", 'f'}, {"Sara", 'f'}, {"Hana", 'f'}, {"Tom", 'm'}, {"Ben", 'm'},
    {"Max", 'm'}, {"Leo", 'm'}, {"Sam", 'm'}, {"Finn", 'm'}, {"Omar", 'm'}, {"Jack", 'm'}, {"Theo", 'm'}, {"Noah", 'm'},
    {"Hugo", 'm'}, {"Peter", 'm'}, {"Ravi", 'm'}, {"Milo", 'm'},
};
static const Name animal_names[] = {
    {"Hazel", 'f'}, {"Poppy", 'f'}, {"Willow", 'f'}, {"Clover", 'f'}, {"Daisy", 'f'}, {"Maple", 'f'}, {"Ginger", 'f'},
    {"Luna", 'f'}, {"Pip", 'm'}, {"Rusty", 'm'}, {"Biscuit", 'm'}, {"Bruno", 'm'}, {"Bramble", 'm'}, {"Pepper", 'm'},
    {"Acorn", 'm'}, {"Barley", 'm'},
};
static const char* const animal_kinds[] = {  // all of them have paws
    "fox", "rabbit", "hedgehog", "mouse", "bear", "squirrel", "badger", "otter", "beaver", "mole", "raccoon", "kitten",
};
static const Name elders[] = {
    {"old owl", 'f'}, {"old turtle", 'm'}, {"black crow", 'f'}, {"fat toad", 'm'}, {"gray heron", 'f'}, {"slow snail", 'm'},
    {"white goose", 'f'}, {"bearded goat", 'm'}, {"long-eared hare", 'm'}, {"young deer", 'f'}, {"old donkey", 'm'},
    {"wise raven", 'f'}, {"friendly baker", 'm'}, {"tall miller", 'm'}, {"old fisherman", 'm'}, {"traveling singer", 'f'},
    {"kind shepherd", 'f'},
};
static const Name family[] = {
    {"Grandma", 'f'}, {"Grandpa", 'm'}, {"Mama", 'f'}, {"Papa", 'm'}, {"Aunt Rose", 'f'}, {"Uncle Joe", 'm'},
};
static const char* const child_homes[] = {
    "in a small house by the sea", "in a yellow house at the edge of the forest", "in a little house on a green hill",
    "in a stone house near the river", "in a village between two hills", "in a narrow street behind the mill",
    "in a white house next to the lighthouse", "on a farm at the end of a long road", "in a tall house with a blue door",
};
static const char* const animal_homes[] = {
    "under the roots of an old oak", "in a hollow log beside the stream", "in a snug little hole under the hedge",
    "at the foot of a mossy rock", "in a warm den on the side of a hill", "in a tiny house made of sticks and moss",
    "at the edge of the great forest", "in a quiet corner of the meadow",
};
static const char* const traits[] = {  // adjective / sentence
    "curious / {H} asked a hundred questions every day.",
    "kind / {H} had a friendly word for everyone.",
    "clever / {H} could find an answer to almost everything.",
    "cheerful / {H} sang from morning until night.",
    "quiet / {H} spoke little, but {he} saw everything.",
    "dreamy / {H} often looked at the clouds and forgot the time.",
    "stubborn / When {H} had an idea, nobody could talk {him} out of it.",
    "shy / {H} hid behind {P} when strangers came.",
    "lively / {H} could not sit still for one minute.",
    "gentle / {H} never stepped on an ant.",
    "careful / {H} looked at everything twice.",
    "hungry / {H} could eat from breakfast until supper.",
};

static const char* const barriers[] = {  // barrier / way
    "but soon {he} came to a wide river without a bridge. / {M} showed {him} a row of flat stones, and {he} jumped from one to "
      "the next.",
    "but then the path went into a dark tunnel. / {M} gave {him} a little lamp, and the dark moved aside.",
    "but there a huge fallen tree lay across the road. / {M} pointed to a gap between the roots, and {he} crawled through.",
    "but then {he} stood in front of a steep wall of rock. / {M} knew where the strong roots were, and {he} climbed up as on a "
      "ladder.",
    "but there the road ended in a field of thorns. / {M} knew a secret path, just wide enough for small feet.",
    "but then a thick fog came up, as white as milk. / {M} went ahead and sang, and {he} followed the song.",
    "but at the gate stood a giant goose who let nobody pass. / {M} whispered the right word, and the gate stood open.",
    "but soon {he} came to a place where five roads met. / {M} drew a map in the sand, and {he} learned it by heart.",
};

// ---------------------------------------------------------------------------------------------------------------------
// the seasons

static const char* const season_names[4] = {"spring", "summer", "autumn", "winter"};
static const char season_letters[5] = "psaw";
static const char* const weathers[4] = {
    "rainy|mild|fresh|windy", "sunny|bright|hot|golden", "windy|misty|cool|gray", "cold|snowy|frosty|icy",
};
static const char* const skies[4] = {
    ("The snow had melted, and the first flowers were out.|Soft rain had washed the whole world clean.|"
     "The birds were back and sang from every branch.|It was spring, and the air smelled of wet earth.|"
     "The trees wore new green leaves."),
    ("The sun was warm, and the bees were busy.|It was the middle of summer, and the days were long.|"
     "The grass was high, and the sky was blue.|It was so hot that even the flies were lazy.|"
     "The wheat stood tall and yellow in the fields."),
    ("Red and gold leaves covered the path.|The wind blew the leaves around like little birds.|"
     "It was autumn, and the apples were ripe.|A gray mist lay over the fields.|The wild geese were flying south."),
    ("Snow lay on every roof.|It was so cold that ice flowers grew on the windows.|"
     "It was winter, and the pond was frozen.|The snow fell softly, day and night.|"
     "The wind was sharp, and smoke rose from every chimney."),
};

// ---------------------------------------------------------------------------------------------------------------------
// lines that every plot may use

typedef struct { const char* name; const char* lines[MAX_LINES]; } List;

static const List lists[] = {
    {"open", {
        "once upon a time, there was {intro}. {he} lived {home}.", "{intro} lived {home}.",
        "once there was {intro} who lived {home}.",
        "there was once {intro}, and {he} lived {home}.", "long ago, {intro} lived {home}.", "{home} lived {intro}.",
        "not so long ago, {intro} lived {home}.", "this is the story of {intro} who lived {home}.",
    }},
    {"day", {
        "one {weather} morning,", "one {weather} day,", "one morning in {season},", "one day,", "then, one {weather} morning,",
        "one {weather} afternoon,",
    }},
    {"joy", {
        "{H} laughed out loud.", "{H} jumped for joy.", "{H} smiled from ear to ear.",
        "{H} was so happy that {he} danced in a circle.",
        "{H} clapped {his} {hand}s.", "{H} felt as light as a feather.", "{his} eyes shone like two stars.",
        "{H} could hardly believe it.",
    }},
    {"sad", {
        "{H} felt very sad.", "a tear rolled down {his} nose.", "{H} sat down and sighed.",
        "{his} heart was as heavy as a wet coat.",
        "{H} hung {his} head.", "{H} wanted to cry.",
    }},
    {"spot", {
        "in the barn, but there was only hay", "behind the well, but there was only an old bucket",
        "under the bed, but there was only dust",
        "under the table, but there were only crumbs", "by the gate, but there was only a rusty nail",
        "in the big chest, but there were only blankets",
        "behind the stove, but there was only the broom", "in the shed, but there was only wood",
    }},
    {"walk", {
        "{he} walked along the river and over the hill", "{he} followed the winding path through the trees",
        "{he} went past the old mill and across the fields",
        "{he} climbed over the stone wall and crossed the meadow", "{he} walked and walked until {his} legs were tired",
        "{he} followed the stream down into the valley",
    }},
    {"think", {"thought for a while", "nodded slowly", "closed one eye", "smiled", "looked up at the sky", "coughed a little"}},
    {"meal", {
        "warm bread with honey", "a big apple pie", "hot pancakes with jam", "thick vegetable soup", "berries with cream",
        "roasted chestnuts",
        "a cake with nuts", "cheese and fresh bread",
    }},
    {"end", {
        "that night, {H} slept better than ever before.", "{H} never forgot that day.",
        "when the moon came up, {H} was already asleep, with a smile on {his} face.",
        "that night, {H} told the stars all about it.",
        "and if you ask {H} about it today, {he} will tell you the whole story.",
        "it was a day to remember.", "they still talk about it today.",
    }},
    {"friends", {
        "from that day on, {H} and {F} were the best of friends.", "after that, {H} and {F} met every single day.",
        "{H} and {F} stayed friends for the rest of their lives.", "since then, where {H} goes, {F} is never far away.",
    }},
    {"wrong", {"What is the matter?", "Why do you look so sad?", "What has happened?", "What is wrong?"}},
};

// ---------------------------------------------------------------------------------------------------------------------
// the plots. A row: the seasons it can happen in (p spring, s summer, a autumn, w winter, - any), then the fields in `keys`

typedef struct { const char* keys; const char* rows[MAX_LINES]; const char* beats[16]; } Plot;

static const Plot plots[] = {
    // something loved is lost, and found with a friend
    {"thing / fine / why / where / how / rescue", {
        "- / kite / red kite with the long tail / {P} had made it from paper and string / in the top of the elm tree / the "
          "wind had carried it up there / {F} held the ladder while {H} climbed up and pulled it free",
        "- / ball / blue ball / it could jump higher than a house / under the wooden bridge / it had rolled down the hill all "
          "by itself / {H} fished it out with a long stick while {F} held on to {his} coat",
        "- / hat / green hat / it kept {his} ears warm and made {him} look important / on the head of a scarecrow / someone "
          "had found it on the road and put it there / {H} gave the scarecrow an old bucket and took the hat back",
        "- / key / little silver key / it opened the box with all {his} treasures / in the nest of a magpie / the magpie loved "
          "everything that shone / {H} offered her a shiny button, and she dropped the key right into {his} {hand}",
        "- / doll / old rag doll / it had only one eye and always listened / in the basket of the neighbor's dog / the puppies "
          "had wanted something soft to sleep on / {F} brought the puppies a pillow, and they let the doll go",
        "psa / boat / little wooden boat / {P} had carved it from a piece of oak / between the reeds of the pond / the stream "
          "had carried it away in the night / a friendly duck gave the boat a push, and it sailed right into {H}'s {hand}s",
        "w / scarf / striped scarf / {P} had knitted it for {him} / around the neck of a snowman / the wind had blown it off "
          "the fence, and the snowman had looked so cold / {H} gave the snowman a string of red berries instead",
        "- / drum / small round drum / it sounded like rain on a roof / at the bottom of the dry well / it had rolled off the "
          "wall / {F} let down a rope with a hook, and together they pulled it up",
        "- / whistle / tin whistle / all the birds answered it / in the pocket of {his} other coat / {he} had put it there and "
          "forgotten all about it / {H} turned red, and then they both laughed until they had to sit down",
        "- / bell / tiny brass bell / it rang as clear as water / around the neck of a little lamb / somebody had found it in "
          "the grass / {H} gave the lamb a ribbon, and the lamb gave back the bell",
        "psa / book / thick book of stories / there was a dragon on every page / on the bench by the mill / {he} had been "
          "reading there when the rain began / {F} wiped the cover, and not one page was wet",
        "w / mitten / warm red mitten / there was a star on it / in the deep snow beside the gate / three tiny birds were "
          "sitting in it, for they thought it was a nest / {F} made them a nest of hay, and they flew over to it with a happy "
          "song",
        "- / lantern / little green lantern / its light made the dark friendly / on a post by the river / the ferryman had "
          "used it to find his boat / he thanked them for the light and gave them a silver fish for supper",
        "- / spoon / wooden spoon / soup tasted better with it / in the roof of the henhouse / the hens had thought that it "
          "was just a good stick / {F} found a better stick, and everyone was pleased",
     }, {
        "{open} {trait} Of all {his} things, {H} loved {his} {fine} the most, because {why}.",
        "{day} [the {thing} was gone|{H} could not find the {thing} anywhere|{H} reached for the {thing}, but it was not "
          "there]. {he} looked {spot}. {he} looked {spot}. {sad}",
        "[{F} came by|just then, {F} came up the path|{F} heard {him} from far away]. \"{wrong}\" asked {F}. \"I have lost my "
          "{thing},\" said {H}. \"[Then we will look for it together|Do not worry, I will help you look|Two can look better "
          "than one],\" said {F}.",
        "?First they asked [the postman, but he had seen nothing|the washerwoman, but she had seen nothing|the boy with the "
          "geese, but he had seen nothing].",
        "[On the road they met {M}|Behind the hill they met {M}|Near the bridge they met {M}]. \"Have you seen {a thing}?\" "
          "asked {H}. {M} {think}. \"[Yes, I have|I think so|Maybe I have],\" {mhe} said. \"Look {where}.\"",
        "They ran as fast as they could. [And there it was, {where}!|And really, there was the {thing}, {where}.] {how}. "
          "{rescue}.",
        "{joy} \"[Thank you, {F}|You are a true friend, {F}],\" {he} said. \"[Without you I would still be looking under the "
          "bed|I would never have found it alone|Now it is even dearer to me than before].\"",
        "[{friends}|They sat down together and ate {meal}. {end}|{end}]",
     }},
    // something has to be learned, and falling is part of it
    {"skill / fail / advice / success", {
        "s / swim / {he} splashed and sank and came up with a green weed on {his} nose / Do not fight the water. Lie on it as "
          "if it were a soft bed / {he} lay down on the water, kicked twice, and swam all the way to the little island",
        "- / ride a bicycle / the wheels wobbled, and {he} fell into a bush / Do not look at your feet. Look where you want to "
          "go / {he} looked straight ahead, and the wheels rolled and rolled, all the way to the red barn",
        "- / whistle / only air came out / Wet your lips and think of a bird / a clear high note rang out, and a bird answered "
          "from the hedge",
        "w / skate / {he} slid, turned around twice, and sat down hard on the ice / Bend your knees and lean a little forward "
          "/ {he} glided across the frozen pond in one long line",
        "- / bake bread / the loaf was as flat as a plate and as hard as a brick / Keep the dough warm, and give it time to "
          "rest / the loaf rose round and golden, and the whole house smelled good",
        "- / play the flute / it squeaked like a rusty gate / Blow softly, as if you wanted to cool your soup / a sweet tune "
          "came out, and even the wind stopped to listen",
        "- / climb the tall oak / {he} slid down again and scratched {his} knee / Test each branch before you trust it, and "
          "never hurry / {he} climbed from branch to branch until {he} could see the whole valley",
        "psa / row a boat / the boat only turned around and around like a leaf / Pull with both arms at the same time / the "
          "boat went straight across the pond like a swan",
        "- / juggle / three apples fell on {his} head, one after the other / Begin with one apple. When one is easy, take two "
          "/ all three apples danced in the air and came back into {his} {hand}s",
        "- / knit / the wool turned into one big knot / Make one stitch at a time, and do not pull so hard / row after row "
          "grew under {his} {hand}s until the scarf was warm and long",
        "- / tell stories / {he} forgot the ending, and everyone went home / Choose one face, and tell the story only to that "
          "face / everybody sat very still and wanted to hear more",
        "- / make pancakes / the first pancake stuck to the pan, and the second one landed on the floor / Wait until you see "
          "small bubbles, and then turn it quickly / the pancake flew up, turned over, and landed right in the middle of the "
          "pan",
        "- / read / the letters jumped around like fleas / Read one word and then the next. Nobody is chasing you / the "
          "letters turned into words, and the words turned into a story about a dragon",
        "- / paint / all the colors ran together into one brown puddle / Let one color dry before you use the next / there was "
          "the valley on the paper, as bright as the morning",
        "ps / fly a kite / the kite went up, and then it dived into the nettles / Run against the wind, and let the string out "
          "slowly / the kite climbed higher and higher until it was only a dot in the sky",
        "- / sing / {his} voice cracked like an old door / Stand up straight and breathe deep down into your belly / {his} "
          "voice rose warm and clear, and people opened their windows",
     }, {
        "{open} {trait} [More than anything|Most of all], {H} wanted to learn to {skill}.",
        "{day} {he} tried it for the first time. But {fail}. [{F} saw it and had to laugh, but not in a mean way.|{F} watched, "
          "and could not help laughing.|] \"[I will never learn it|I am just too small for this|Everyone can do it but me],\" "
          "said {H}. {sad}",
        "[Just then, {M} came along.|But {M} had seen everything.|Nearby sat {M}.] \"[Nobody is born with it|Everyone begins "
          "like that|I fell down too, when I was young],\" said {M}. \"Here is a secret. {advice}.\"",
        "{H} tried again, and it went a little better. {he} tried the next day, and the day after that. [Sometimes {he} wanted "
          "to stop, but {he} did not.|In the evening {he} was so tired that {he} fell asleep over {his} soup.|Even in {his} "
          "dreams {he} kept trying.]",
        "[After many days|Two weeks later|Then, one {weather} morning], it happened. {success}. {joy} \"Look!\" {he} called. "
          "\"I can {skill}!\"",
        "?{P} came out of the house and [clapped|laughed with joy|could only stare]. \"[I always knew it|You did not give up, "
          "and that is the hardest part|Now you must teach me],\" {phe} said.",
        "\"[You see,|There,]\" said {M}, \"[a long road is made of small steps|patience is slow, but it gets there|the ones "
          "who fall and get up again learn the most].\"",
        "[The next day, {F} asked, \"Can you teach me, too?\" And {H} could.|{end}|That evening they all ate {meal}. {end}]",
     }},
    // a small animal is helped, and helps in return
    {"creature / trouble / aid / later / back", {
        "ps / young bird / it had fallen out of its nest / {H} wrapped it in {his} scarf and carried it up the ladder to its "
          "nest / {H} lost {his} way in a thick fog / The bird flew from branch to branch and sang, and {H} followed the song "
          "all the way home",
        "- / little lizard / it was caught under a heavy pot / {H} lifted the pot with a strong stick / {H} stepped into a "
          "rope, and {he} could not get free / The lizard found the end of the knot and pulled it loose with its tiny mouth",
        "ps / bee / it had fallen into a cup of water / {H} let it climb onto a leaf and dried its wings in the sun / a big "
          "angry dog barked at {H} and would not let {him} pass / The bee buzzed around the dog's ears until the dog ran away",
        "ps / frog / it sat in a deep bucket and could not jump out / {H} carried the bucket to the pond and tipped it over / "
          "{H} dropped {P}'s golden ring into the well / The frog dived down into the dark water and came up with the ring in "
          "its mouth",
        "s / worm / it lay in the middle of the hot road / {H} carried it to the soft earth under a tree / {H}'s garden grew "
          "dry and hard, and nothing wanted to grow / The worm and all its cousins dug a thousand little tunnels, and the "
          "earth became soft again",
        "w / deer / it was stuck in the deep snow / {H} dug a path with a shovel and gave it some hay / {H} was too tired to "
          "walk home through the snow / The deer let {him} ride on its back, and it knew every path under the snow",
        "- / pigeon / a string was tied around its leg / {H} cut the string very carefully / a storm took the boat away, and "
          "{H} was alone on the island / The pigeon carried a letter to {P}, who came with a new boat at once",
        "- / spider / the wind had torn its web, and it hung over a puddle / {H} held out a leaf and put the spider on a dry "
          "branch / {H} tore {his} best coat on a thorn, just before the feast / The spider mended it with silver thread, so "
          "fine that nobody could see the hole",
        "- / pony / it had a sharp stone in its foot / {H} held its leg and pulled out the stone / {H} had to carry a heavy "
          "sack of flour home from the mill / The pony took the sack on its back and carried it up the hill as if it were a "
          "pillow",
        "s / firefly / it was caught under a glass / {H} lifted the glass and opened the window / {H}'s lantern went out in "
          "the middle of the dark forest / The firefly called its brothers and sisters, and together they lit the whole path",
        "ps / duckling / it had lost its family / {H} carried it to the pond, where its mother was calling / the wind blew "
          "{H}'s hat far out onto the water / Seven ducklings swam out in a line and brought the hat back to the shore",
        "aw / lamb / it was caught in a thorn bush / {H} bent back the thorns, one by one / night came, and {H} was still on "
          "the cold mountain / The lamb brought the whole flock, and the sheep kept {him} warm until morning",
        "- / cricket / somebody had shut it up in a box / {H} opened the box and set it free / {H} could not sleep, because "
          "the night was so quiet and so big / The cricket sat down under the window and played its softest song",
        "psa / swan / its foot was caught in a fishing net / {H} waded into the water and opened the net / {H}'s little boat "
          "had a hole and began to sink / The swan swam up beside the boat and carried {him} safely to the shore",
     }, {
        "{open} {trait} [{sky}|]",
        "{day} {walk}. [Suddenly {he} heard a small voice|Then {he} heard somebody crying|Behind a stone, somebody was "
          "calling]. \"Help! Please help me!\" It was a {creature}. {trouble}.",
        "\"[Hold still, I am coming|Do not be afraid|Wait, I will help you],\" said {H}. {aid}. [\"Is that better?\" asked "
          "{H}.|It took a long time, but {H} was patient.|]",
        "\"[Thank you|You are very kind],\" said the {creature}. \"[One day I will help you, too|When you need me, I will be "
          "there|I will not forget this].\" {H} smiled. [How could a {creature} ever help {him}?|\"That is nice of you,\" {he} "
          "said, and went on {his} way.]",
        "[Many weeks later|Some time later|Not long after that], {later}. {he} did not know what to do. [{sad}|\"Is anybody "
          "there?\" {he} called.|{he} called for help, but nobody came.]",
        "Then {he} heard a voice that {he} knew. It was the {creature}! \"[You helped me, and now I will help you|Now it is my "
          "turn|I told you that I would come],\" it said. {back}.",
        "{joy} \"[You saved me|What would I do without you],\" said {H}. [\"That is what friends are for,\" said the "
          "{creature}.|\"Kindness always finds its way back,\" said the {creature}.|\"Now we are even,\" said the {creature}, "
          "\"but let us stay friends.\"]",
        "[At home, {H} told {P} everything. {P} put {meal} on the table and listened until the end.|{end}|{H} and the "
          "{creature} have been friends ever since.]",
     }},
    // two friends want the same thing
    {"thing / found / broke / share", {
        "- / swing / {P} hung a swing in the old oak / they both pulled at the ropes until one of them broke / They mended the "
          "rope and took turns, ten pushes each",
        "- / cake / {P} gave them one small cake / they pulled so hard that the cake fell into the mud / They baked a new cake "
          "together and cut it exactly in the middle",
        "- / wagon / they found an old wagon behind the barn / one wheel came off and rolled into the river / They put on a "
          "new wheel, and one of them pulled while the other one rode",
        "- / box of paints / they found a box of paints in the attic / the box fell down, and the colors ran over the floor / "
          "They wiped the floor and painted one big picture together",
        "w / sled / they found an old sled in the barn / the sled slid down the hill without them and hit a tree / They nailed "
          "on a new board and rode down the hill together, one in front and one behind",
        "- / book / {P} gave them a book about the sea / two pages were torn, right in the middle of the storm / They glued "
          "the pages and read the book aloud, one page each",
        "- / umbrella / it began to rain, and they had only one umbrella / the umbrella turned inside out and flew away over "
          "the field / They caught the umbrella and walked home under it, very close together",
        "a / pumpkin / they found one huge pumpkin in the field / the pumpkin rolled off the wall and broke into pieces / They "
          "cooked a big pot of soup from it, and the whole street came to eat",
        "- / drum / they found a drum at the market / it got a hole, and nobody could play it any more / They mended the skin, "
          "and one of them drummed while the other one danced",
        "psa / boat / they made a little boat from bark / the boat was crushed in their {hand}s / They made two new boats, and "
          "tied them together, so that neither would be alone",
        "- / tent / {P} gave them an old tent / the tent tore from top to bottom / They sewed it up again and slept in it side "
          "by side",
        "s / watermelon / {P} gave them a big watermelon / it fell down and rolled all the way into the pond / They fished it "
          "out, cut it into slices, and spat the seeds over the fence",
     }, {
        "{open} {his} best friend was {fkid}. [They did everything together.|They played together every day.|They had never "
          "had a quarrel.] [{sky}|]",
        "{day} {found}. [\"It is mine,\" said {H}. \"No, it is mine,\" said {F}. \"I saw it first!\" cried {H}.|\"I want it,\" "
          "said {H}. \"No, I want it,\" said {F}. \"I said it first!\" cried {H}.|\"Me first,\" said {H}. \"No, me first,\" "
          "said {F}. \"You are always first!\" cried {H}.] [They shouted louder and louder.|They grew red in the face.|]",
        "[They pushed and they pulled, and|Nobody wanted to give in, and so] {broke}. [\"Now look what you have done!\" cried "
          "{F}. \"I? You did it!\" cried {H}.|\"This is your fault!\" cried {F}. \"No, it is yours!\" cried {H}.] And they "
          "both went home without another word.",
        "At home, {H} [sat by the window|lay on {his} bed|pushed {his} soup around]. [The house was very quiet.|There was "
          "nobody to play with.|Even the clock sounded lonely.] \"{wrong}\" asked {P}. {H} told {phim} everything. \"[Hm|I "
          "see],\" said {P}. \"[What is worth more, {a thing} or a friend?|Can {a thing} laugh with you?|Who is more sad now, "
          "you or {F}?]\"",
        "{H} thought about it [all night|for a long time]. In the morning {he} ran to {F}'s house. But {F} was already [coming "
          "up the path|standing at the gate]. \"I am sorry,\" they both said at the very same moment. Then they had to laugh.",
        "{share}. [It was much more fun than before.|And do you know what? It was twice as good.|\"This is better,\" said {F}, "
          "and {H} thought so, too.]",
        "[{friends}|{end}|\"Many things can be mended,\" said {P}, \"and a friendship most of all.\"]",
     }},
    // fear, looked at closely
    {"fear / moment / sign / truth / after", {
        "- / the dark / the candle went out, and everything was black / something tall stood in the corner and did not move / "
          "It was only {his} own coat on its hook / {H} gave the coat a bow and said good night to it",
        "s / thunder / a storm came over the hill / the windows shook, and the sky turned white / It was only the clouds, "
          "bumping into each other like big fat sheep / {H} counted the seconds between the flash and the bang, and each time "
          "the storm was farther away",
        "- / the dog at the farm / {P} sent {him} to the farm for eggs / the dog came running and barked as loud as it could / "
          "The dog had a thorn in its foot and only wanted help / {H} pulled out the thorn, and the dog licked {his} nose",
        "- / the old house on the hill / {his} ball flew over the wall of the old house / the door creaked, and something "
          "white came out / It was only an old woman in a white apron, with a plate of cookies / the old woman was so glad to "
          "have a visitor that she told stories until supper",
        "- / the attic / {P} sent {him} up to the attic for a blanket / something went tap, tap, tap behind the wall / It was "
          "only a branch of the pear tree, knocking on the window / {H} opened the window and shook hands with the branch",
        "- / the high bridge / {his} hat blew across the high bridge / the boards moved under {his} feet, and far below the "
          "water roared / The bridge was strong, and it did not move when {he} looked at the other side and not down / {H} "
          "walked back and forth three times, just because {he} could",
        "- / the cellar / {P} sent {him} down to the cellar for potatoes / something growled behind the barrels / It was only "
          "the neighbor's old dog, snoring in the potato basket / {H} put a blanket over the dog and left on tiptoe",
        "psa / deep water / {his} ball rolled into the lake / the water was dark, and something touched {his} leg / It was "
          "only a water lily with a long green stem / {H} got the ball and took the lily home for {P}",
        "- / the forest at night / {P}'s medicine was on the other side of the forest / two yellow eyes looked down from a "
          "tree / It was only a very small owl who was afraid of {him} / the little owl flew ahead and showed {him} the way",
        "- / the scarecrow / {he} had to cross the field at sunset / the scarecrow lifted one arm and waved / It was only the "
          "wind, playing with its sleeve / {H} waved back, and since then {he} does it every evening",
        "w / the howling in the chimney / the fire burned low, and {he} was alone in the kitchen / something howled in the "
          "chimney, first low and then high / It was only the wind, who was cold and wanted to come in / {H} put more wood on "
          "the fire and howled back, and it sounded like a song",
        "- / the big bell in the tower / the bell ringer was ill, and someone had to ring the bell / the tower hummed, and the "
          "air shook in {his} ears / It was only a sound, deep and round like a great bowl / {H} pulled the rope again, and "
          "the whole village looked up and waved",
     }, {
        "{open} {H} was not afraid of [spiders or mice|wolves or ghosts|rain or snow]. But there was one thing {he} was afraid "
          "of, and that was {fear}.",
        "?[\"I am never scared,\" said {F}, \"not even of {fear}.\"|\"How can you be afraid of {fear}?\" asked {F}.|\"Do not "
          "worry,\" said {F}. \"I will not tell anyone.\"] ^{H} said nothing.",
        "One {weather} evening, {moment}. {H} [swallowed hard|held {his} breath|stood very still]. Then {sign}. {his} heart "
          "[beat like a drum|jumped like a frog], and {he} wanted to run away.",
        "But {he} remembered what {P} had told {him}. \"[Brave is not the one who has no fear. Brave is the one who looks|A "
          "fear is like a shadow. When you bring a light, it gets small|When you are afraid, count to three and look again].\" "
          "So {H} took a deep breath. One. Two. Three. {he} [looked|opened {his} eyes|took one step closer].",
        "{truth}. {H} began to laugh, first a little and then a lot. \"[Is that all|So it is only you],\" {he} said. And "
          "{after}.",
        "[At home, {P} asked, \"Were you afraid?\" \"Yes,\" said {H}, \"but then I looked.\"|When {H} told {F} about it, {F} "
          "said, \"You are the bravest {kid} I know.\"|\"I was afraid,\" {he} told {P}, \"but my fear was bigger than the "
          "thing itself.\"]",
        "[{end}|And the next time {F} was afraid of something, {H} took {fhis} {fhand} and said, \"Count to three and look "
          "again.\"|Since then, {fear} and {H} have been good friends.]",
     }},
    // a long way for someone else
    {"need / item / place / price / effect", {
        "- / {P} had a bad cough and could not sleep / a jar of honey / the hollow tree behind the waterfall / The bees wanted "
          "to hear a song first, and {H} sang them the one about the moon / {P} drank hot milk with honey and slept the whole "
          "night",
        "sa / the well in the village had run dry / a bucket of clear water / the spring at the top of the mountain / The "
          "spring was blocked by a stone, and {H} rolled it away / the water ran down the mountain, all the way to the "
          "village, and the well was full again",
        "- / the clock in the tower had stopped, and nobody knew when to have supper / a small brass wheel / the clockmaker's "
          "house by the sea / The clockmaker wanted no money, only a story, and {H} told him one / the clock ticked again, and "
          "it has never been late since then",
        "- / the baby could not stop crying / a soft gray feather / the nest of the wild geese / The oldest goose asked for a "
          "polite word, and {H} said please / the baby touched the feather, laughed, and fell asleep",
        "- / the lamp in the lighthouse had gone out / a can of oil / the shop on the other side of the bay / The shop was "
          "already closed, but {H} knocked until the window opened / the lamp shone over the sea, and all the boats came "
          "safely home",
        "s / {P} had a birthday, and there was no fruit for the cake / a basket of blueberries / the clearing behind the hill "
          "/ {H} picked them one by one, and left half of them for the birds / the cake was so good that nobody said a word "
          "until it was gone",
        "ps / {F} was ill and could not see the sun / a yellow flower / the meadow at the top of the mountain / There were "
          "only three, so {H} took one and left two for the bees / the flower stood beside {F}'s bed and filled the room with "
          "light",
        "w / the stove was cold, and the wood was all gone / a sack of dry wood / the woodcutter's hut in the forest / The "
          "woodcutter had hurt his arm, so {H} swept the hut for him / the fire crackled, and soon the whole house was warm",
        "- / {P} had lost {phis} glasses and could not read any more / a pair of round glasses / the old peddler's cart at the "
          "crossroads / The peddler asked a riddle, and {H} knew the answer / {P} read aloud until midnight, because there was "
          "so much to catch up on",
        "- / the baker had no more salt, and the bread tasted of nothing / a bag of salt / the white hills by the sea / The "
          "salt was as heavy as a stone, but {H} carried it all the way / everybody in the village got a warm loaf, and {H} "
          "got the biggest one",
        "aw / there was no music for the feast, because the fiddle had lost a string / a new fiddle string / the house of the "
          "old fiddle maker / The fiddle maker was asleep, so {H} waited quietly until he woke up / the fiddle played, and "
          "people danced until the moon went down",
        "- / the little bell of the school had lost its voice / a drop of silver / the smith under the mountain / The smith "
          "needed someone to blow the fire, and {H} blew until {his} cheeks were red / the bell rang so brightly that even the "
          "sleepy children came on time",
     }, {
        "{open} {trait} [{sky}|]",
        "{day} {need}. [\"What can we do?\" asked {P}.|Everybody talked, but nobody knew what to do.|\"If only we had "
          "{item},\" people said.] \"I will go and get {item},\" said {H}. \"But you are so small,\" said {P}. \"[Small feet "
          "can walk far|I am small, but I am not afraid|Then I will just take more steps],\" said {H}.",
        "{H} packed [an apple and a piece of bread|some bread and cheese|a bottle of tea and two cookies] and set out for "
          "{place}. {walk}.",
        "{barrier} {H} wanted to turn back. But there sat {M}. \"[Where are you going, little one?|What are you looking "
          "for?]\" asked {M}. \"I need {item} from {place},\" said {H}, and shared {his} food with {mhim}. \"[You have a good "
          "heart|That is a long way],\" said {M}. {way} \"Thank you!\" called {H}.",
        "At last {he} came to {place}. {price}. And so {he} got what {he} had come for: {item}.",
        "{H} ran home as fast as {he} could. [It was already dark when {he} reached the door.|The stars were out when {he} "
          "came to the gate.] And then {effect}. {joy}",
        "\"[How did you do it?|Was it very far?]\" asked {P}. \"[Step by step|One step after the other|I had some help],\" "
          "said {H}.",
        "[{end}|They all sat down and ate {meal}. {end}|And nobody ever called {H} too small again.]",
     }},
    // things vanish in the night
    {"things / first / clue / thief / reason / deal", {
        "- / cookies / two cookies were / tiny crumbs led to a hole in the wall / a mother rat with six hungry babies / My "
          "children are hungry, and it is cold outside / {H} put a plate of crumbs in front of the hole every evening, and no "
          "more cookies were missing",
        "- / socks / one sock was / a thread of wool hung from the window and led up to the roof / a stork on her nest / My "
          "eggs were so cold / {H} gave the stork an old sweater, and four weeks later there were three little storks in it",
        "s / carrots / three carrots were / round footprints led under the fence / a thin gray donkey / Nobody gives me "
          "anything but dry straw / {H} planted one more row of carrots, just for the donkey",
        "- / spoons / one silver spoon was / a black feather lay on the table / a young jackdaw in the tower / I was lonely, "
          "and they shine like stars / {H} gave the jackdaw one spoon to keep, and every day it came by with the news of the "
          "village",
        "a / apples / two red apples were / a long brown hair hung on the gate / a pony from the next farm / Nobody ever comes "
          "to see me / {H} visited the pony every Sunday, with one apple in each pocket",
        "- / candles / one candle was / drops of wax led down to the cellar / an old bat with a thick book / I love to read, "
          "but my eyes are weak / {H} gave the bat a little lamp, and the bat told {him} all the stories in the book",
        "- / buttons / one button was / a row of buttons led under the floor / a family of beetles / We needed plates for the "
          "wedding / {H} let them keep the plates, and that night there was tiny music under the floor",
        "w / bread / one piece of bread was / small footprints in the snow led to the shed / a robin with a frozen "
          "wing / I did not dare to ask / {H} made the robin a bed of hay, and it stayed until spring and sang every morning",
        "- / milk / one cup of milk was / white paw prints led under the stairs / a little stray cat / I have no home "
          "/ {H} asked {P}, and {P} said yes, and the cat was called Snow from then on",
        "ps / strawberries / a handful of strawberries was / a silver line led across the leaves / a very slow slug / I only "
          "take one a night, and it takes me until morning / {H} planted a strawberry bush behind the shed, and the slug moved "
          "there in three days",
        "- / pencils / one pencil was / a small pile of wood dust lay on the floor / a woodworm in the desk / They taste so "
          "good / {H} brought the woodworm an old branch, and it liked the branch even better",
     }, {
        "{open} {trait} [{sky}|]",
        "{day} something strange happened. {first} gone. The next morning, [it happened again|even more was missing]. \"[Did "
          "you do that?|Was it you?]\" asked {P}. \"No,\" said {H}, and it was true. \"[Maybe it was a ghost|Perhaps they grew "
          "legs],\" said "
          "{F}. \"[Then we must catch it|Let us find out|We have to keep watch],\" said {H}.",
        "That night, the two friends hid behind [the curtain|the big barrel|the kitchen door] and waited. The clock struck "
          "nine. The clock struck ten. [{F} was almost asleep.|{F} began to snore a little.|It was so quiet that they could "
          "hear each other breathe.]",
        "Suddenly there was a [soft|small|strange] noise. [{H} held {his} breath.|\"Did you hear that?\" whispered {F}.|{H} "
          "lit the lamp.] Somebody had been there, for {clue}. [Very quietly they went to look.|On tiptoe they went to see.] "
          "And there they found {thief}!",
        "\"[So it was you|Now we have you]!\" said {F}. \"Why did you take our {things}?\" asked {H}. \"[I am sorry|Please do "
          "not be angry]. {reason},\" was the answer.",
        "{F} looked at {H}, and {H} looked at {F}. [They were not angry any more.|Nobody could be angry about that.|\"You "
          "could have asked,\" said {H} in a friendly voice.] {deal}.",
        "[\"A thief is sometimes only somebody who needs a friend,\" said {P}.|{friends}|{end}|\"That was no ghost at all,\" "
          "said {F}. {H} laughed. \"No,\" {he} said, \"it was much nicer than a ghost.\"]",
     }},
    // something breaks, and the truth is hard to say
    {"thing / act / hide / repair", {
        "- / blue vase / {H} played ball in the house, and the ball hit {P}'s blue vase / under the bed / They glued the "
          "pieces together with gold paint, and now the vase was even more beautiful",
        "- / best teapot / {H} danced through the kitchen and bumped into {P}'s best teapot / behind the flour sack / They "
          "planted a little fern in the broken teapot and put it on the window sill",
        "- / music box / {H} wound up {P}'s music box too hard, and the spring broke / in the drawer / They opened it together "
          "and put in a new spring, and it played a little slower than before, like a song for sleepy people",
        "- / big mirror / {H} fought a battle against a pillow, and the pillow won and hit the big mirror / behind the "
          "cupboard / They made a picture of the sun from the pieces, and it threw spots of light all over the room",
        "- / glasses / {H} sat down on {P}'s glasses / in the sugar pot / They mended the glasses with a piece of red wire, "
          "and {P} said that {phe} could see better than ever",
        "- / picture frame / {H} ran down the stairs too fast and pulled {P}'s picture frame off the wall / in the wood box / "
          "They built a new frame from four straight sticks, and {H} painted small birds on it",
        "- / honey pot / {H} wanted just one spoon of honey, but {he} dropped the honey pot / under the stairs / They swept "
          "the floor, washed their sticky {hand}s, and made a new pot out of clay",
        "- / garden lamp / {H} threw stones at a bucket, and one of them hit the garden lamp / in the rain barrel / They put "
          "colored paper where the glass had been, and the lamp shone red and green and blue",
        "- / fishing rod / {H} used {P}'s fishing rod as a sword, and it broke in two / in the haystack / They cut a new rod "
          "from the hazel bush and went fishing together",
        "- / clock / {H} wanted to see how the clock worked, and then {he} could not put it together again / inside a boot / "
          "They laid out all the wheels on the table and put them back, one by one, until it ticked",
     }, {
        "{open} {trait} [{sky}|]",
        "{day} {P} went to the market, and {H} was alone at home. \"[Be good|Take care of the house|I will be back soon],\" "
          "said {P}. But {act}. Oh no! ^[then it was very quiet|for a moment, even the birds were silent].",
        "{H} [turned pale|stood very still|did not dare to breathe]. \"[What now|What have I done],\" {he} whispered. \"{P} "
          "will be so angry.\" Quickly {he} picked everything up and hid it {hide}.",
        "When {P} came home, {phe} asked, \"Was everything all right?\" \"Yes,\" said {H}. But [the soup did not taste "
          "good|{his} supper tasted like sand|{he} could not look at {phim}]. [The word lay in {his} belly like a stone.|The "
          "lie sat on {his} shoulder like a heavy bird.] That night, {H} could not sleep.",
        "?\"{wrong}\" asked {F} the next day. {H} told {fhim} what {he} had done. \"[Just tell the truth|You will feel better "
          "when you say it],\" said {F}. \"[It is like pulling out a thorn|It hurts only for a moment].\"",
        "[At last {he} could bear it no longer.|In the end, {H} made up {his} mind.] {he} went to {P}, and {his} voice was "
          "very small. \"I broke your {thing},\" {he} said, \"and I hid it, and I told a lie. I am sorry.\"",
        "{P} was silent for a moment. Then {phe} [took {him} in {phis} arms|sat down beside {him}|stroked {his} head]. \"[I am "
          "a little sad about the {thing}, but I am glad that you told me|Things can break, but your word should stay "
          "whole|That was harder than hiding it, and I am proud of you],\" {phe} said. \"Come, let us see what we can do.\"",
        "{repair}. {joy}",
        "[That night, {H} fell asleep at once.|{end}|\"The truth is light,\" thought {H}, \"and a lie is heavy.\" And then "
          "{he} fell asleep.]",
     }},
    // a birthday that everybody seems to forget
    {"gift / sign / place", {
        "- / a new drum / a strange knocking from the shed / the barn, which was full of lights",
        "- / a tree house with a real window / the sound of hammers / the old oak, where everyone stood and waved",
        "- / a fiddle / soft music behind the hedge / the meadow, where a long table stood under the trees",
        "- / a cake as tall as {H} / the smell of sugar / the kitchen, which was full of friends",
        "- / a blue boat with {his} name on it / fresh blue paint on {F}'s nose / the pond, where lanterns hung in every tree",
        "- / a cloak with silver stars / a silver thread on {F}'s sleeve / the tower, where a hundred candles were burning",
        "- / a map of the whole world / a spot of ink on {F}'s {fhand} / the school, where everybody was hiding under the "
          "tables",
        "- / a bicycle with a red bell / a short ring behind the wall / the market square, where all the neighbors were "
          "waiting",
        "w / a sled with a soft seat / the sound of a saw / the hill, where a big fire was burning in the snow",
        "- / a puppy with one white ear / a small bark behind the door / the garden, where everyone was trying not to laugh",
     }, {
        "{open} {trait} Tomorrow was {his} birthday. {he} was so excited that {he} could hardly sleep.",
        "In the morning, {H} ran [downstairs|into the kitchen|out of bed]. But {P} only said, \"[Good morning. Please bring in "
          "some wood|Good morning. Eat your porridge before it gets cold|Oh, you are up early].\" There was no cake and no "
          "song. {sad}",
        "{H} went to see {F}. \"Do you know what day it is?\" {he} asked. \"[Of course|Yes, I do],\" said {F}. \"It is "
          "[washing day|market day|a good day for sleeping].\" And {fhe} closed the door [very quickly|in a hurry]. {H} "
          "noticed {sign}, but {he} was too sad to think about it.",
        "Even {M} who passed by said nothing but \"[Nice weather today|Good day to you].\" {H} sat down under a tree. "
          "\"[Everyone has forgotten me|Nobody remembers my birthday],\" {he} said. {sad}",
        "When the sun was low, {F} came running. \"[Come quickly, we need your help|Hurry, something has happened]!\" {fhe} "
          "called. {H} wiped {his} eyes and followed {fhim} to {place}.",
        "\"Surprise!\" they all shouted. \"Happy birthday, {H}!\" There was {P}, and there was {M}, too. And there was a "
          "present, from all of them: {gift}. {joy}",
        "\"But I thought you had forgotten me,\" said {H}. \"[Forgotten?|You?]\" said {P} and laughed. \"[We have been "
          "planning it for weeks|It was so hard to say nothing|We could think of nothing else].\"",
        "They ate {meal} and sang until midnight. [{end}|{H} was the happiest {kid} in the world.|\"The best present is all of "
          "you,\" said {H}.]",
     }},
    // a seed needs time
    {"plant / seed / trick / grown / gift", {
        "ps / sunflower / a striped seed / {he} dug it up to see if it was awake / it was taller than the house, and its face "
          "followed the sun / {he} gave the seeds to the birds when winter came, but kept one for next year",
        "ps / pumpkin / a flat white seed / {he} poured ten buckets of water over it / it was so big that {F} could sit in it "
          "/ they cooked soup for the whole village",
        "ps / beanstalk / a spotted bean / {he} pulled at the little stem to make it longer / it went up the wall, across the "
          "roof, and down the other side / there were beans for everyone, and {P} made a great pot of stew",
        "ps / apple tree / a small brown seed / {he} held a lamp over it at night, so that it would not sleep / it bloomed "
          "white and pink, and in autumn there was one single apple / {he} cut the apple into four pieces and shared it with "
          "all {his} friends",
        "ps / rose bush / a dry little stick / {he} shouted at it to hurry up / it had one red rose that smelled of summer / "
          "{he} gave the rose to {P}, who put it in the best glass",
        "ps / strawberry plant / a seed as small as dust / {he} put a warm blanket on it in the middle of summer / it had "
          "seven red berries / {he} ate only one of them and gave away the others, and that one tasted best of all",
        "ps / melon / a slippery black seed / {he} sang loud songs to it at midnight / it was round and heavy and sweet as "
          "honey / {he} invited everybody who had waited with {him}",
        "ps / cherry tree / a cherry stone / {he} told it that it was already late / it was as tall as {H}, and its branches "
          "were full of white flowers / {he} hung a swing on it many years later, for all the children of the village",
        "ps / corn plant / a golden grain / {he} blew on it to keep it warm / it stood as high as a soldier, with a beard and "
          "a green coat / they roasted the corn over a fire and told stories all night",
     }, {
        "{open} {trait} {day} {P} gave {him} {seed}. \"[What is it?|Is it something to eat?]\" asked {H}. \"[Plant it and "
          "wait|It is a secret, and only the earth knows it],\" said {P}.",
        "{H} made a hole in the ground, put the seed in, and gave it some water. Then {he} sat down beside it. [{he} waited "
          "for one whole hour.|{he} waited until supper.] Nothing happened. \"[It is broken|It does not work],\" {he} said.",
        "The next day, nothing could be seen. The day after that, {trick}. [{F} shook {fhis} head.|\"What are you doing?\" "
          "asked {F}.] \"[It is too slow|I cannot wait any longer]!\" said {H}.",
        "[Then {M} came along.|{M} looked over the fence.] \"[A seed has its own clock|You cannot hurry the sun, and you "
          "cannot hurry a seed],\" said {M}. \"[Give it water, give it light, and give it time|Do a little every day, and "
          "leave the rest to the rain].\"",
        "So {H} learned to wait. Every morning {he} gave it a little water. [When it rained, {he} was glad.|{he} pulled out "
          "the weeds.] [{he} told it stories.|{he} kept the snails away.] And while {he} waited, {he} [built a bench|learned a "
          "song|read three books|made a new friend].",
        "[Then, one morning, there was a tiny green point in the earth.|One morning, something green looked out of the "
          "ground.] \"Good morning!\" said {H}. It grew and grew. It was {a plant}! And in the end, {grown}. {joy}",
        "And {H}? ^{gift}. \"[It was worth the wait|Good things take their time],\" said {P}. [{end}|\"I know,\" said {H}. \"I "
          "waited, and it grew, and I think I grew a little, too.\"|{end}]",
     }},
    // a race, won by stopping
    {"race / rival / mishap / aid / prize", {
        "psa / the boat race on the river / big strong boy with the fast boat / hit a rock and began to sink / {H} threw him a "
          "rope and pulled him into {his} own boat / silver cup",
        "- / the race around the hill / proud girl with long legs / fell and hurt her foot / {H} let her lean on {his} "
          "shoulder, and they walked on together / golden ribbon",
        "w / the sled race / loud boy with the shiny new sled / drove into a snowdrift, and only his boots looked out / {H} "
          "dug him out with both {hand}s and rubbed his cold fingers / basket of oranges",
        "ps / the kite contest / clever girl with a kite like a dragon / lost her kite in a tree and cried / {H} let go of "
          "{his} own string and climbed up to get the dragon / ball of golden string",
        "- / the egg and spoon race / boy who always won / dropped his egg and stood there with empty hands / {H} gave him the "
          "egg from {his} own pocket / white hen",
        "- / the cart race / girl with a cart as red as fire / lost a wheel at the sharp corner / {H} took the spare wheel "
          "from {his} own cart and put it on hers / bag of nuts",
        "- / the great race through the forest / quick boy with new shoes / ran the wrong way and got lost in the thick trees "
          "/ {H} went back to look for him, and called until he answered / crown of leaves",
        "s / the swimming race / boy who swam like a fish / got a cramp and called for help / {H} turned around and pulled him "
          "to the shore / shell that sang like the sea",
        "a / the pumpkin race / girl with the roundest pumpkin of all / slipped, and her pumpkin rolled away toward the river "
          "/ {H} ran after it and stopped it at the last moment / pumpkin pie",
     }, {
        "{open} {trait} Every {season}, the whole village came to see {race}, and the winner got {a prize}. [{H} had never won "
          "anything.|This year {H} wanted to win.]",
        "{H} [practiced every morning|got up with the sun to practice|practiced until {his} legs hurt]. {F} helped {him} and "
          "counted the time. \"[You are getting faster|You can do it],\" said {F}. But there was also {a rival}, and everybody "
          "said, \"That one will win.\"",
        "Then the day came. {sky} The whole village was there. {P} waved a handkerchief. \"[On your marks|Is everyone "
          "ready?|Ready?],\" called the judge. \"Go!\"",
        "{H} was fast. Soon there was only one in front of {him}, and that was the {rival}. {he} came closer and closer. But "
          "then the other one {mishap}. [{H} saw the way to the finish, wide and free.|Now {H} could win.] \"Keep going!\" "
          "somebody shouted. \"You are first!\"",
        "{H} [stopped|slowed down|thought of it for only a moment]. \"[Are you all right?|Wait, I will help you],\" {he} "
          "called. {aid}. [One after the other, the rest of them went past.|Behind them, the others came closer and went by.]",
        "And so {H} came in last. [But nobody looked at the winner.|The winner was already holding the {prize}.] It grew very "
          "quiet. Then {P} began to clap, and {F} clapped, and in the end the whole village was clapping. The winner came over "
          "and gave the {prize} to {H}. \"[You have earned it|This is yours],\" said the winner. {joy}",
        "[\"Next year we will race again,\" said the other one, \"and I will wait for you at the finish.\"|\"You lost the "
          "race,\" said {F}, \"but you won something else.\"|{end}]",
     }},
    // one wish, and what to do with it
    {"magic / spirit / first / second / wish / result", {
        "- / a dusty lamp / a tiny man made of smoke / a mountain of candy / a golden coach / that {P} would be well again / "
          "{P} got up, opened all the windows, and began to dance",
        "psa / a green bottle from the sea / an old voice that smelled of salt / a crown / a castle with a hundred rooms / "
          "that all the nets in the village would be full / the boats lay deep in the water, and silver fish jumped over the "
          "sides",
        "- / a smooth white stone / a voice as soft as snow / a bag of gold / wings / that the lost boat would come home / a "
          "white sail came around the rocks, and all the people ran down to the beach",
        "- / a little silver bell / a fairy no bigger than a thumb / a hundred toys / a horse that could fly / that it would "
          "rain on the dry fields / big warm drops fell from the sky, and the whole village danced in the rain",
        "- / a bottle with a cork / a very small cloud / a cake that never ends / to be taller than everyone / that nobody in "
          "the village would be hungry / every pot in the village was full of soup, and it smelled of herbs",
        "- / a feather that shone in the dark / a bird made of light / a ship with white sails / to be a king / that the lost "
          "birds would find their way home / a long line of birds came over the hill, and they sang all night",
        "w / a snowflake that did not melt / the queen of the snow / a palace of ice / shoes of silver / that the old people "
          "would have warm houses / every chimney began to smoke, and there was light in all the windows",
        "- / an old coin with a star on it / the man in the moon / all the money in the world / to live on the moon / that "
          "{he} could always make {P} laugh / {P} laughed that evening until {phe} had to hold on to the table",
        "- / a blue glass marble / a sleepy little wizard / a room full of marbles / to know everything / for one new friend / "
          "there was a new voice at the gate, asking, \"Can I play with you?\"",
     }, {
        "{open} {trait} [{sky}|]",
        "{day} {walk}. There in the grass lay {magic}. [{H} picked it up and rubbed it on {his} sleeve.|{H} bent down and held "
          "it against the light.] Suddenly there was {spirit}. \"[You have found me|You have woken me up],\" said the voice. "
          "\"You may make one wish. But only one, so think well.\"",
        "[{H} could hardly breathe.|{H} had to sit down.] \"I could wish for {first},\" {he} thought. \"But [that would soon "
          "be gone|what would I do with it|who would I share it with]?\" Then {he} thought, \"I could wish for {second}.\" But "
          "that did not feel right, either.",
        "{he} asked {F}. \"[Wish for something big|Take the gold]!\" said {F}. {he} asked {M}. \"[Wish for what you would give "
          "away|The best wish is the one you do not keep for yourself],\" said {M}. {H} thought about it [until the stars came "
          "out|the whole evening].",
        "Then {he} knew it. \"I wish {wish},\" said {H}. \"[That is a good wish|In a thousand years, nobody has asked for "
          "that],\" said the voice. There was a sound like a small bell, and everything was quiet.",
        "In the morning, {result}. {joy}",
        "[\"Are you not sad that your wish is gone?\" asked {F}. \"No,\" said {H}, \"it is not gone. It is "
          "everywhere.\"|{end}|And the voice? Nobody ever heard it again. But {H} did not need it any more.]",
     }},
    // building something, with everyone's help
    {"thing / first / fault / part / use", {
        "psa / raft / logs and rope / it sank like a stone / empty barrels / they sailed down the river and waved at the cows",
        "- / tree house / boards and nails / it leaned to one side, and all the nuts rolled out / a strong beam / they sat up "
          "there in the evening and counted the stars",
        "w / snow house / round balls of snow / the roof fell in on {his} head / long flat blocks of snow / they drank hot tea "
          "in it, and it was warmer than they had thought",
        "ps / bridge / thin sticks / it broke as soon as {he} stepped on it / two long tree trunks / everyone could cross the "
          "stream with dry feet",
        "- / windmill / paper and wood / it did not turn at all / wide wings of cloth / it turned day and night and ground "
          "their corn",
        "- / puppet theater / an old box / the curtain fell down in the middle of the play / a stick and six rings / the whole "
          "village came to see the play about the dragon who was afraid of mice",
        "- / wagon / planks and four wheels / it went only in circles / a straight axle / they rode down the hill, and the "
          "wind sang in their ears",
        "- / flying machine / feathers and glue / it fell straight into the hay / a big sheet and a basket / it did not fly "
          "very far, but for one moment they could see over the roof",
        "- / oven / stones and mud / all the smoke came out at the front / a chimney / they baked bread for everyone who had "
          "helped",
        "- / bench / old boards / it broke in the middle when {P} sat down / two more legs / tired people sat down there and "
          "looked at the sunset",
        "- / bird house / a cracked pot / the rain came in / a roof of bark / a pair of little birds moved in on the very "
          "first day",
     }, {
        "{open} {trait} {day} {H} had an idea. \"I am going to build {a thing},\" {he} said. \"[All by myself|Without any "
          "help].\"",
        "{he} worked the whole day with {first}. {P} asked, \"Do you need help?\" \"No, thank you,\" said {H}. In the evening, "
          "the {thing} was finished. But {fault}. {sad}",
        "The next day {he} tried once more, and the same thing happened. [{F} looked over the fence.|Just then, {F} came by.] "
          "\"[May I say something?|I have an idea],\" said {F}. \"You need {part}.\" {H} [frowned|crossed {his} arms|kicked a "
          "stone]. \"I wanted to do it alone,\" {he} said. \"[Alone is good, but together is better|You can be the captain, "
          "and I will be the crew],\" said {F}.",
        "So they looked for {part}. [{M} showed them where to look.|They asked {M}, and {mhe} knew where to look.] \"[Can I "
          "help, too?|May I try it when it is finished?]\" asked {M}. \"Of course,\" said {H}.",
        "They measured and sawed and hammered. {H} held, and {F} tied the knots, and {M} called, \"[A little more to the "
          "left|That looks good|Careful]!\" [{P} brought {meal}.|When it got dark, {P} held the lamp.]",
        "Then it was finished. They all held their breath. And it worked! {joy} From then on, {use}.",
        "\"[It is the best {thing} in the world|I could never have built it alone],\" said {H}. [\"Nobody builds anything "
          "alone,\" said {P}.|\"Shall we build another one?\" asked {F}.|{end}]",
     }},
    // trading one thing for the next
    {"goal / t0 / p1 / need1 / t1 / p2 / need2 / t2 / p3 / need3 / t3", {
        "- / a present for {P} / a red button / the tailor / one red button for a coat / a piece of strong thread / the "
          "fisherman / thread for my net / a silver fish / the potter / a fish for my supper / a blue cup with a bird on it",
        "- / a fiddle / a long feather / the writer / a feather for my pen / a poem / the gardener / a poem for my wedding / a "
          "basket of pears / the fiddle maker / something sweet / a small brown fiddle",
        "- / a warm coat / three eggs / the baker / eggs for my cake / a fresh loaf / the woodcutter / bread for my lunch / a "
          "bundle of wood / the weaver / wood for my cold stove / a warm gray coat",
        "- / a pair of boots / an old bell / the goatherd / a bell for my goat / a round cheese / the soldier / cheese for my "
          "long march / a shiny buckle / the shoemaker / a shiny buckle for a shoe / a pair of red boots",
        "- / a book / a ball of wool / the old lady / wool for a sock / a jar of jam / the teacher / jam for my bread / a box "
          "of chalk / the bookseller / chalk for my sign / a book with gold letters",
        "- / a little boat / a bag of nails / the roofer / nails for the roof / a wooden ladder / the apple farmer / a ladder "
          "for my trees / a barrel of apples / the sailor / apples for a long journey / a little boat with a white sail",
        "- / a cake for {F} / a bunch of flowers / the bride / flowers for my hair / a white ribbon / the milkmaid / a ribbon "
          "for my best cow / a jug of cream / the cook / cream for my kitchen / a cake with cherries",
        "- / a puppy / a shiny shell / the girl by the well / a shell to hear the sea / a blue marble / the boy on the wall / "
          "one blue marble to win the game / a leather belt / the farmer / a belt to hold up my trousers / a puppy with big "
          "ears",
     }, {
        "{open} {trait} {H} wanted {goal}, but {he} had no money at all. {he} had only {t0}. \"[Everything is good for "
          "something|Let us see how far I get],\" {he} said, and set out for the market. [{sky}|]",
        "First {he} met {p1}. \"I need {need1},\" said {p1}. \"[Then take mine|Here you are],\" said {H}, and gave away {t0}. "
          "\"[How kind of you|Thank you]! Take this for it.\" And {H} got {t1}.",
        "[A little later|At the next corner|By the fountain], {he} met {p2}. \"[If only I had|I am looking everywhere for] "
          "{need2},\" said {p2}. \"[You can have this|Here, take this],\" said {H}. And for {t1}, {he} got {t2}.",
        "?On the bridge stood {M}. \"What a strange thing to carry,\" said {M}. \"[Not at all|Just wait],\" said {H}. "
          "\"[Somebody is waiting for it|Everything has its place].\"",
        "[At the end of the street|Behind the church|In the last house], {he} met {p3}. \"[All day long I have wished for|What "
          "I really need is] {need3},\" said {p3}. {H} held out {t2}. \"[Will this do?|What about this?]\" ^{p3} [laughed with "
          "joy|clapped]. \"It is just right! What would you like for it?\" And {H} got {t3}.",
        "{joy} \"In the morning I had only {t0},\" {he} thought, \"and now I have {t3}. And everyone I met is happier than "
          "before.\"",
        "[When {he} came home, {P} did not believe {his} story. But it was true.|{F} wanted to hear it three times.|{end}] "
          "[{end}|]",
     }},
    // someone new
    {"odd / guess / deed / game", {
        "- / carried a big black box everywhere / There must be a monster in that box / there was an accordion in the box, and "
          "it could laugh and cry / made music",
        "- / never said a word / He must be very proud / {F} spoke another language and did not know the words yet / taught "
          "each other new words",
        "- / always wore a thick scarf, even in the sun / Maybe there is no neck under it / {F} had got the scarf from {fhis} "
          "grandmother, who lived far away / wrote letters to {fhis} grandmother",
        "- / went into the forest every evening / That cannot be anything good / {F} was feeding a young deer that had no "
          "mother / brought milk to the young deer",
        "- / looked at the ground all the time / Somebody must have lost a treasure there / {F} was collecting stones with "
          "tiny shells in them / collected stones",
        "- / slept all day and walked around at night / Only thieves do that / {F} knew the names of all the stars / watched "
          "the stars from the roof",
        "- / talked to the trees / Trees cannot hear / {F} was practicing for a play and needed someone to listen / put on "
          "plays in the barn",
        "- / walked with a stick and very slowly / That one is no good for running / {F} could throw a ball farther than "
          "anyone else / played ball",
        "- / had paint on both ears / Nobody washes there / {F} was painting birds on every wall of the house / painted a "
          "whole wall together",
     }, {
        "{open} {trait} {day} somebody new moved into the empty house next door. It was {fkid}. [{sky}|]",
        "But {F} was strange. {fhe} {odd}. \"[{guess}|Have you seen it? {guess}|Be careful. {guess}],\" said the others. [They "
          "kept away from the house.|They ran when {F} came out.|Nobody said hello.] {H} kept away, too, but {he} "
          "[wondered|was curious|did not feel good about it].",
        "\"Have you ever spoken to {fhim}?\" asked {P}. \"No,\" said {H}. \"[Then how can you know?|A closed book tells no "
          "story],\" said {P}. [\"Go and say hello.\"|\"Somebody has to say hello first.\"|\"Perhaps {fhe} is only waiting.\"]",
        "So {H} [took a plate of cookies|picked some flowers|took two apples] and went next door. {he} knocked, and {his} "
          "heart beat fast. The door opened just a little. \"[Hello|Good day],\" said {H}. \"I am {H}. [This is for you|I live "
          "over there].\" {F} [smiled|opened the door wide|blushed]. \"[You are the first one who has come|I was hoping that "
          "somebody would come],\" said {F}.",
        "And then {H} found out why. {deed}. \"[Why did you never tell anyone?|That is wonderful! Why did you never say so?]\" "
          "asked {H}. \"Nobody "
          "asked,\" said {F}.",
        "The next day they {game}, and the day after that, too. [One after the other, the neighbors came and joined in.|Soon "
          "the others looked over the wall, and {H} called, \"Come over!\"] ^{joy}",
        "[{friends}|\"{F} is not strange at all,\" said {H}. \"I just did not know {fhim}.\"|{end}]",
     }},
    // a night without sleep
    {"try1 / try2 / call / answer", {
        "- / counted sheep, but the sheep began to dance / drank warm milk, but then {he} was thirsty again / the moon / Tell "
          "me about your day, and I will shine on the best part",
        "- / turned the pillow around, but the other side was too cold / hid under the blanket, but it was too hot / the night "
          "wind / Breathe with me, slowly in and slowly out",
        "- / closed {his} eyes very tightly, but then {he} saw colors / lay upside down, but {his} feet were cold / the old "
          "clock / Listen to me. Tick means all is well, and tock means so are you",
        "- / sang {his} own lullaby, but it was too exciting / counted to one hundred, but then {he} wanted to know what came "
          "next / a little star / I am awake too, every night. You can sleep, and I will keep watch",
        "psa / thought of nothing, but nothing was very difficult to think of / walked around the room three times, but that "
          "made {him} hungry / the rain / I will drum on the roof, and you can count the drops",
        "w / put on two pairs of socks, but they itched / ate one cookie, but the crumbs were everywhere / the snow / I make "
          "everything quiet. Let me cover your worries, one by one",
        "- / read a book, but it was about a tiger / looked under the bed, but nobody was there to talk to / the fire in the "
          "stove / Look into me. Every spark is a thought, and it may fly away now",
     }, {
        "{open} {trait} But one {season} night, {H} could not sleep. [Tomorrow was a big day.|{H} had slept too long in the "
          "afternoon.|There was too much to think about.]",
        "{he} {try1}. {he} {try2}. \"[I will never sleep again|How do other people do it?],\" said {H}. {he} went to {P}, but "
          "{P} was snoring. {he} knocked on the wall, but {F} did not answer.",
        "So {he} opened the window and looked out. [The whole world was dark and still.|Far away, a dog barked once.] \"[Is "
          "anybody awake?|Does nobody hear me?]\" {he} asked softly. \"I am,\" said {call}.",
        "{H} was not afraid, for the voice was [old and kind|as soft as wool|deep and quiet]. \"I cannot sleep,\" {he} said. "
          "\"[I know|That happens],\" said {call}. \"{answer}.\"",
        "[{H} lay down again and listened.|{H} pulled up the blanket and tried it.] {he} thought of [{meal}|the green hills], "
          "and of [{F}|{P}], and of [the long road by the river|a boat with a white sail]. {his} eyes grew heavy. \"[Are you "
          "still there?|Will you stay?]\" {he} whispered. \"[Always|All night],\" said {call}.",
        "But {H} did not hear the answer any more. [{he} was fast asleep.|{he} was already far away, in the land of dreams.]",
        "[In the morning, {P} asked, \"Did you sleep well?\" \"Very well,\" said {H}. \"I had company.\"|And when {F} could "
          "not sleep the next night, {H} knew exactly what to say.|And if you cannot sleep one night, open your window and "
          "ask.]",
     }},
    // lost, and finding the way
    {"reason / danger / trick / sign", {
        "a / {he} followed a flying leaf / a thick fog came up, and {he} could not see {his} own feet / {he} stood still and "
          "listened / the bell of the village church",
        "s / {he} ran after a blue butterfly / the sun went down, and all the trees looked the same / {he} climbed the highest "
          "tree / the light in {P}'s kitchen window",
        "w / {he} followed the tracks of a deer / new snow fell and covered all the tracks / {he} built a small wall against "
          "the wind and looked around / a thin line of smoke from {P}'s chimney",
        "ps / {he} wanted to see where the stream began / a storm broke out, and the path turned to mud / {he} waited under a "
          "rock and thought / the stream itself, which flows past {P}'s door",
        "- / {he} looked for the end of the rainbow / night fell, and the path was gone / {he} looked up at the sky / the "
          "bright star that always stands above {P}'s roof",
        "sa / {he} went deeper and deeper into the forest for mushrooms / it grew dark, and {he} did not know one single tree "
          "/ {he} shut {his} eyes and sniffed / the smell of {P}'s fresh bread",
        "- / {he} chased {his} rolling hat / {he} stood at a crossroads with four roads, and they all looked alike / {he} bent "
          "down and looked at the ground / the small round marks of {his} own shoes",
        "- / {he} jumped onto a hay cart and fell asleep / {he} woke up in a valley {he} had never seen / {he} sat down and "
          "put {his} ear to the ground / the slow beat of the old mill wheel",
     }, {
        "{open} {trait} \"[Do not go too far|Stay where you can see the house],\" said {P} every morning. [{sky}|]",
        "But {day} {reason}. Before {he} knew it, {he} was far away from home. Then {danger}. {H} was lost. \"[Hello!|Is "
          "anybody there?]\" {he} called. Nobody answered. {sad}",
        "[Under a tree sat {M}.|Then {he} saw {M}.] \"Please, which way is home?\" asked {H}. \"[I do not know where you "
          "live|I cannot walk so far with you],\" said {M}, \"but I know this. [The one who runs gets more lost|Your feet are "
          "lost, but your ears and your nose and your eyes are not]. [Stop, and think of what you know about home|Look for "
          "something that does not move].\"",
        "So {H} did not run any more. {he} took a deep breath. {trick}. And then {he} noticed it: {sign}! \"That way!\" cried "
          "{H}. [{he} never lost it again.|Step by step {he} followed it.] {walk}.",
        "[There was the gate.|There was the door.] {P} came running and [held {him} tight|lifted {him} up high]. \"I looked "
          "for you everywhere,\" {phe} said. \"[How did you find the way?|Who showed you the way?]\" \"[I stopped running|I "
          "listened to {M}],\" said {H}, \"[and then home found me|and then I knew it].\"",
        "For supper they had {meal}. [{end}|And the next time, {H} looked back at every corner, so that {he} would know the "
          "way.|{end}]",
     }},
};
// clang-format on

// ---------------------------------------------------------------------------------------------------------------------
// telling

enum { NUM_PLOTS = sizeof plots / sizeof plots[0], NUM_LISTS = sizeof lists / sizeof lists[0] };

typedef struct {
    uint64_t seed;
    uint32_t number;  // of the story
    uint64_t draws;
    const char* fact_names[MAX_FACTS];
    char fact_names_buf[MAX_FACT];  // the field names of the plot, cut apart
    char facts[MAX_FACTS][MAX_FACT];
    int num_facts;
    uint32_t used[NUM_LISTS];  // bit i: line i was told
    bool met_friend, met_elder;
    bool capital;  // the next letter starts a sentence
    char text[MAX_STORY];
    size_t length;
} Story;

/* A number in [0, n). */
static int draw(Story* s, int n) { return (int)philox_below(s->seed, RAND_TALES, s->number, s->draws++, (uint64_t)n); }

static int count_lines(const char* const* lines) {
    int n = 0;
    while (n < MAX_LINES && lines[n]) { n++; }
    return n;
}

static void put(Story* s, char c) {
    char last = s->length ? s->text[s->length - 1] : '\n';
    if (s->length + 1 >= sizeof s->text) { die("story %u: longer than %d bytes", s->number, MAX_STORY - 1); }
    bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (letter && s->capital && c >= 'a') { c = (char)(c - 'a' + 'A'); }
    if (letter) { s->capital = false; }
    if (c == '.' || c == '!' || c == '?' || c == '\n') { s->capital = true; }
    if (c == '"' && (last == '!' || last == '?')) { s->capital = false; }  // "Help!" cried the mouse.
    if (c == ',' && (last == '!' || last == '?')) { return; }              // "[Wait|Why?]," said
    if (c == ' ' && (last == ' ' || last == '\n')) { return; }             // an empty choice leaves no gap
    if (c == '\n' && last == ' ') { s->length--; }
    s->text[s->length++] = c;
}

static const char* fact(const Story* s, const char* name, size_t n) {
    for (int i = 0; i < s->num_facts; i++) {
        if (strlen(s->fact_names[i]) == n && memcmp(s->fact_names[i], name, n) == 0) { return s->facts[i]; }
    }
    return NULL;
}

static void set_fact(Story* s, const char* name, const char* value, size_t n) {
    if (s->num_facts == MAX_FACTS || n >= MAX_FACT) { die("story %u: no room for %s", s->number, name); }
    s->fact_names[s->num_facts] = name;
    memcpy(s->facts[s->num_facts], value, n);
    s->facts[s->num_facts++][n] = 0;
}

static void know(Story* s, const char* name, const char* value) { set_fact(s, name, value, strlen(value)); }

/* A line of list i that this story has not used yet, if there is one. */
static const char* list_line(Story* s, int i) {
    int n = count_lines(lists[i].lines), fresh = 0;
    uint32_t all = (uint32_t)((1ull << n) - 1);
    if (s->used[i] == all) { s->used[i] = 0; }
    for (int k = 0; k < n; k++) { fresh += !(s->used[i] >> k & 1); }
    int pick = draw(s, fresh);
    for (int k = 0; k < n; k++) {
        if (s->used[i] >> k & 1) { continue; }
        if (pick-- == 0) {
            s->used[i] |= 1u << k;
            return lists[i].lines[k];
        }
    }
    return "";
}

static void tell(Story* s, const char* t, const char* end, int depth);

/* Tells {name}. */
static void tell_name(Story* s, const char* name, size_t n, int depth) {
    bool article = n > 2 && name[0] == 'a' && name[1] == ' ';
    if (article) {
        name += 2;
        n -= 2;
    }
    bool friend_first = !s->met_friend && ((n == 1 && name[0] == 'F') || (n == 4 && memcmp(name, "fkid", 4) == 0));
    bool elder_first = !s->met_elder && n == 1 && name[0] == 'M';
    if (friend_first && n == 1) {
        name = "friend";
        n = 6;
    }
    if (elder_first) {
        name = "elder";
        n = 5;
    }
    s->met_friend |= friend_first;
    s->met_elder |= elder_first;
    const char* value = fact(s, name, n);
    for (int i = 0; i < NUM_LISTS && !value; i++) {
        if (strlen(lists[i].name) == n && memcmp(lists[i].name, name, n) == 0) { value = list_line(s, i); }
    }
    if (!value) { die("story %u: nothing is known of {%.*s}", s->number, (int)n, name); }
    if (article) {
        put(s, 'a');
        if (strchr("aeiou", value[0])) { put(s, 'n'); }
        put(s, ' ');
    }
    tell(s, value, value + strlen(value), depth + 1);
}

/* The end of the bracket that opens at t. */
static const char* closing(const char* t, const char* end) {
    int level = 0;
    for (; t < end; t++) {
        level += (*t == '[') - (*t == ']');
        if (level == 0) { return t; }
    }
    die("a bracket is not closed: %.60s", t);
}

/* Tells one of the choices between t and end. */
static void tell_choice(Story* s, const char* t, const char* end, int depth) {
    const char* starts[MAX_LINES + 1];
    int n = 0, level = 0;
    starts[n++] = t;
    for (const char* p = t; p < end; p++) {
        level += (*p == '[') - (*p == ']');
        if (*p == '|' && level == 0) {
            if (n == MAX_LINES) { die("too many choices: %.60s", t); }
            starts[n++] = p + 1;
        }
    }
    starts[n] = end + 1;
    int k = n > 1 ? draw(s, n) : 0;
    tell(s, starts[k], starts[k + 1] - 1, depth + 1);
}

static void tell(Story* s, const char* t, const char* end, int depth) {
    if (depth > MAX_DEPTH) { die("story %u: a template contains itself: %.60s", s->number, t); }
    while (t < end) {
        if (*t == '[') {
            const char* close = closing(t, end);
            tell_choice(s, t + 1, close, depth);
            t = close + 1;
        } else if (*t == '{') {
            const char* close = (const char*)memchr(t, '}', (size_t)(end - t));
            if (!close) { die("a brace is not closed: %.60s", t); }
            tell_name(s, t + 1, (size_t)(close - t - 1), depth);
            t = close + 1;
        } else if (*t == '^') {
            s->capital = true;
            t++;
        } else {
            put(s, *t++);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// choosing a cast and a season

/* Cuts "a / b / c" at its slashes; returns how many parts there are. */
static int cut(const char* row, const char** parts, size_t* lengths, int max) {
    int n = 0;
    for (;;) {
        const char* slash = strstr(row, " / ");
        if (n == max) { die("too many fields: %.60s", row); }
        parts[n] = row;
        lengths[n++] = slash ? (size_t)(slash - row) : strlen(row);
        if (!slash) { return n; }
        row = slash + 3;
    }
}

static const char* last_word(const char* s) {
    const char* space = strrchr(s, ' ');
    return space ? space + 1 : s;
}

static void know_pronouns(Story* s, char gender, const char* he, const char* him, const char* his) {
    bool f = gender == 'f';
    know(s, he, f ? "she" : "he");
    know(s, him, f ? "her" : "him");
    know(s, his, f ? "her" : "his");
}

/* A kind of animal other than `not_this` that does not play a part in the row already. */
static const char* draw_kind(Story* s, const char* row, const char* not_this) {
    const int n = sizeof animal_kinds / sizeof animal_kinds[0];
    for (;;) {
        const char* kind = animal_kinds[draw(s, n)];
        if (!strstr(row, kind) && strcmp(kind, not_this) != 0) { return kind; }
    }
}

static const Name* draw_name(Story* s, const char* kind, const char* not_this) {
    const int children = sizeof child_names / sizeof child_names[0], animals = sizeof animal_names / sizeof animal_names[0];
    for (;;) {
        const Name* name = kind[0] ? &animal_names[draw(s, animals)] : &child_names[draw(s, children)];
        if (strcmp(name->name, not_this) != 0) { return name; }
    }
}

static void draw_cast(Story* s, const char* row) {
    char phrase[MAX_FACT];
    const char* parts[2];
    size_t lengths[2];
    // the hero: a child in half of the stories
    const char* kind = draw(s, 2) ? "" : draw_kind(s, row, "");
    const Name* hero = draw_name(s, kind, "");
    cut(traits[draw(s, sizeof traits / sizeof traits[0])], parts, lengths, 2);
    know(s, "H", hero->name);
    know_pronouns(s, hero->gender, "he", "him", "his");
    know(s, "kid", kind[0] ? kind : hero->gender == 'f' ? "girl" : "boy");
    know(s, "hand", kind[0] ? "paw" : "hand");
    snprintf(phrase, sizeof phrase, "%s %.*s %s named %s", strchr("aeiou", parts[0][0]) ? "an" : "a", (int)lengths[0], parts[0],
             kind[0]               ? kind
             : hero->gender == 'f' ? "girl"
                                   : "boy",
             hero->name);
    know(s, "intro", phrase);
    know(s, "trait", parts[1]);
    know(s, "home",
         kind[0] ? animal_homes[draw(s, sizeof animal_homes / sizeof animal_homes[0])]
                 : child_homes[draw(s, sizeof child_homes / sizeof child_homes[0])]);
    // the friend
    const char* friend_kind = draw(s, 2) ? "" : draw_kind(s, row, kind);
    const Name* pal = draw_name(s, friend_kind, hero->name);
    const char* pal_is = friend_kind[0] ? friend_kind : pal->gender == 'f' ? "girl" : "boy";
    know(s, "F", pal->name);
    know_pronouns(s, pal->gender, "fhe", "fhim", "fhis");
    know(s, "fhand", friend_kind[0] ? "paw" : "hand");
    snprintf(phrase, sizeof phrase, friend_kind[0] ? "%s the %s" : "%s from next door", pal->name, friend_kind);
    know(s, "friend", phrase);
    snprintf(phrase, sizeof phrase, "%s %s named %s", strchr("aeiou", pal_is[0]) ? "an" : "a", pal_is, pal->name);
    know(s, "fkid", phrase);
    // someone on the way, and someone at home
    const Name* elder;
    do { elder = &elders[draw(s, sizeof elders / sizeof elders[0])]; } while (strstr(row, last_word(elder->name)));
    snprintf(phrase, sizeof phrase, "the %s", elder->name);
    know(s, "M", phrase);
    snprintf(phrase, sizeof phrase, "%s %s", strchr("aeiou", elder->name[0]) ? "an" : "a", elder->name);
    know(s, "elder", phrase);
    know_pronouns(s, elder->gender, "mhe", "mhim", "mhis");
    const Name* home = &family[draw(s, sizeof family / sizeof family[0])];
    know(s, "P", home->name);
    know_pronouns(s, home->gender, "phe", "phim", "phis");
}

static void draw_season(Story* s, const char* letters) {
    int season;
    do { season = draw(s, 4); } while (letters[0] != '-' && !memchr(letters, season_letters[season], strcspn(letters, " ")));
    know(s, "season", season_names[season]);
    char choice[MAX_FACT];
    snprintf(choice, sizeof choice, "[%s]", weathers[season]);
    know(s, "weather", choice);
    snprintf(choice, sizeof choice, "[%s]", skies[season]);
    know(s, "sky", choice);
}

static void tell_story(Story* s, uint64_t seed, uint32_t number) {
    memset(s, 0, sizeof *s);
    s->seed = seed;
    s->number = number;
    s->capital = true;
    const Plot* plot = &plots[draw(s, NUM_PLOTS)];
    const char* row = plot->rows[draw(s, count_lines(plot->rows))];
    const char *keys[16], *fields[17], *parts[2];
    size_t key_lengths[16], lengths[17];
    int num_keys = cut(plot->keys, keys, key_lengths, 16), num_fields = cut(row, fields, lengths, 17);
    if (num_fields != num_keys + 1) { die("%d fields, wanted %d: %.60s", num_fields, num_keys + 1, row); }
    strcpy(s->fact_names_buf, plot->keys);
    for (int i = 0; i < num_keys; i++) {
        char* name = s->fact_names_buf + (keys[i] - plot->keys);
        name[key_lengths[i]] = 0;
        set_fact(s, name, fields[i + 1], lengths[i + 1]);
    }
    draw_season(s, row);
    draw_cast(s, row);
    cut(barriers[draw(s, sizeof barriers / sizeof barriers[0])], parts, lengths, 2);
    set_fact(s, "barrier", parts[0], lengths[0]);
    know(s, "way", parts[1]);
    for (int i = 0; plot->beats[i]; i++) {
        const char* beat = plot->beats[i];
        if (beat[0] == '?' && draw(s, 2)) { continue; }
        beat += beat[0] == '?';
        if (s->length) { put(s, '\n'); }
        tell(s, beat, beat + strlen(beat), 0);
    }
    while (s->length && s->text[s->length - 1] == ' ') { s->length--; }
    s->text[s->length] = 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// the program

static void write_json(FILE* f, const Story* s) {
    fputs("{\"text\": \"", f);
    for (size_t i = 0; i < s->length; i++) {
        char c = s->text[i];
        if (c == '"') { fputc('\\', f); }
        if (c == '\n') {
            fputs("\\n", f);
        } else {
            fputc(c, f);
        }
    }
    fputs("\"}\n", f);
}

static uint64_t parse_number(const char* flag, const char* text, uint64_t min, uint64_t max) {
    char* end = NULL;
    errno = 0;
    unsigned long long v = text ? strtoull(text, &end, 10) : 0;
    if (!text || end == text || *end || errno || text[0] == '-' || v < min || v > max) {
        die_usage("%s: is %s, wanted a whole number from %llu to %llu", flag, text ? text : "missing", (unsigned long long)min,
                  (unsigned long long)max);
    }
    return v;
}

int main(int argc, char** argv) {
    const char* const usage =
        "usage: tinytales [--stories N] [--seed S] [--text] [-o FILE]\n"
        "  --stories N  how many stories (default 6000, about 7.5 MB)\n"
        "  --seed S     another seed tells other stories (default 1)\n"
        "  --text       plain text with an empty line between stories, not {\"text\": ...} lines\n"
        "  -o FILE      the file to write (default: standard output)\n";
    uint64_t stories = DEFAULT_STORIES, seed = 1;
    const char* path = NULL;
    bool plain = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--stories") == 0) {
            stories = parse_number(argv[i], argv[i + 1], 1, UINT32_MAX);
            i++;
        } else if (strcmp(argv[i], "--seed") == 0) {
            seed = parse_number(argv[i], argv[i + 1], 0, UINT64_MAX);
            i++;
        } else if (strcmp(argv[i], "--text") == 0) {
            plain = true;
        } else if (strcmp(argv[i], "-o") == 0 && i + 1 < argc) {
            path = argv[++i];
        } else if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(usage, stdout);
            return 0;
        } else {
            die_usage("%s: unknown or incomplete flag\n%s", argv[i], usage);
        }
    }
    FILE* f = path ? fopen(path, "wb") : stdout;
    if (!f) { die("%s: cannot write: %s", path, strerror(errno)); }
    Story* s = (Story*)xmalloc(sizeof *s);
    for (uint64_t i = 0; i < stories; i++) {
        tell_story(s, seed, (uint32_t)i);
        if (plain) {
            fprintf(f, "%s%s\n", i ? "\n" : "", s->text);
        } else {
            write_json(f, s);
        }
    }
    free(s);
    bool ok = fflush(f) == 0 && !ferror(f);
    if (path) { ok = fclose(f) == 0 && ok; }
    if (!ok) { die("%s: writing failed: %s", path ? path : "standard output", strerror(errno)); }
    return 0;
}
