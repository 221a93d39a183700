/* tinytales.c -- writes the embedded data set: short stories for children, from a grammar and counter-based random numbers.
 * Every machine gets the same bytes, without a download.
 *
 *   tinytales [--stories N] [--seed S] [--end TEXT] [--text] [-o FILE]
 *
 * Output: one {"text": "..."} line per story, or with --text plain text with an empty line between stories.
 *
 * A story is a plot, a cast and a season. Each plot has a table with a row for each hero: the thing that is lost, feared or
 * built, and so on. 13 plots times 8 heroes make 104 tales. Each story words its tale anew. A plot is a list of paragraphs in a
 * small template language:
 *
 *   [a|b|c]   one of these, with equal probability; may be nested; [a|] is "a or nothing"
 *   {key}     a fact of this story (a field of the row, or the cast below); otherwise a line of the list with that name. A list
 *             repeats a line within a story only when all its lines are used
 *   {a key}   the same with "a" or "an" in front, by its first letter
 *   ^         makes the next letter a capital. A sentence starts with one anyway, unless it follows !" or ?"
 *
 *   H he him his hand kid     the hero, "hand" or "paw", and "girl", "boy" or the animal
 *   F fhe fhim fhis fhand     the friend: "Pip the hedgehog" or "Leo from next door" at first, "Pip" later; {fkid} is
 *                             "a hedgehog named Pip"
 *   M mhe mhim mhis           someone met on the way: "an old turtle" at first, "the old turtle" later
 *   P phe phim phis           someone grown up at home: "Grandma"
 *   intro home trait          the hero in one phrase, where, and a sentence about the hero
 *   season weather            the time of the year, and an adjective for its days
 */
#include "llmc/base/utils.h"
#include "llmc/base/rand.h"

enum { MAX_STORY = 1 << 14, MAX_FACTS = 64, MAX_FACT = 512, MAX_DEPTH = 16, MAX_LINES = 32, DEFAULT_STORIES = 8000 };

// clang-format off
// ---------------------------------------------------------------------------------------------------------------------
// the cast

// As in a series of books, the hero decides who the others are, and which row of a plot's table the story uses. This makes the
// first minutes of training worth reading: after a million tokens a small model knows who is who and which thing was lost. With
// any name in any place it still mixes them up after three million.
typedef struct { const char* name; char gender; } Person;
typedef struct {
    Person hero, pal, elder, family;
    const char* kind;         // of the hero; NULL: a child
    const char* friend_kind;  // all animals have paws
    const char* adjective;
    const char* trait;
    const char* home;
} Cast;

static const Cast casts[] = {
    {{"Lily", 'f'}, {"Pip", 'm'}, {"old fisherman", 'm'}, {"Grandpa", 'm'}, NULL, "mouse",
     "curious", "{H} asked a hundred questions every day.", "in a small house by the sea"},
    {{"Tom", 'm'}, {"Clover", 'f'}, {"white goose", 'f'}, {"Mama", 'f'}, NULL, "rabbit",
     "dreamy", "{H} often looked at the clouds and forgot the time.", "in a village between two hills"},
    {{"Mia", 'f'}, {"Leo", 'm'}, {"bearded goat", 'm'}, {"Papa", 'm'}, NULL, NULL,
     "stubborn", "When {H} had an idea, nobody could talk {him} out of it.", "in a narrow street behind the mill"},
    {{"Max", 'm'}, {"Ginger", 'f'}, {"friendly baker", 'm'}, {"Grandma", 'f'}, NULL, "kitten",
     "hungry", "{H} could eat from breakfast until supper.", "in a tall house with a blue door"},
    {{"Hazel", 'f'}, {"Bruno", 'm'}, {"old owl", 'f'}, {"Aunt Rose", 'f'}, "squirrel", "bear",
     "cheerful", "{H} sang from morning until night.", "under the roots of an old oak"},
    {{"Biscuit", 'm'}, {"Poppy", 'f'}, {"slow snail", 'm'}, {"Uncle Joe", 'm'}, "hedgehog", "mole",
     "shy", "{H} hid behind {P} when strangers came.", "in a snug little hole under the hedge"},
    {{"Bramble", 'm'}, {"Daisy", 'f'}, {"black crow", 'f'}, {"Grandma", 'f'}, "badger", "otter",
     "kind", "{H} had a friendly word for everyone.", "in a warm den on the side of a hill"},
    {{"Luna", 'f'}, {"Barley", 'm'}, {"fat toad", 'm'}, {"Papa", 'm'}, "raccoon", "beaver",
     "clever", "{H} could find an answer to almost everything.", "in a hollow log beside the stream"},
};
// ---------------------------------------------------------------------------------------------------------------------
// the seasons

static const char* const season_names[4] = {"spring", "summer", "autumn", "winter"};
static const char season_letters[5] = "psaw";
static const char* const weathers[4] = {
    "[rainy|mild|fresh|windy]", "[sunny|bright|hot|golden]", "[windy|misty|cool|gray]", "[cold|snowy|frosty|icy]",
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
          "wind had carried it up there / {F} held the ladder while {H} climbed up and pulled the kite free",
        "- / hat / green hat / it kept {his} ears warm and made {him} look important / on the head of a scarecrow / someone "
          "had found it on the road / {H} gave the scarecrow an old bucket and took the hat back",
        "- / key / little silver key / it opened the box with all {his} treasures / in the nest of a magpie / the magpie loved "
          "everything that shone / {H} offered her a shiny button, and she gave back the key",
        "- / doll / old rag doll / it had only one eye and always listened / in the basket of the neighbor's dog / the puppies "
          "had wanted something soft to sleep on / {F} brought the puppies a pillow, and they let the doll go",
        "psa / boat / little wooden boat / {P} had carved it from a piece of oak / between the reeds of the pond / the stream "
          "had carried it away in the night / a duck gave the boat a push, and it sailed right into {H}'s {hand}s",
        "w / scarf / striped scarf / {P} had knitted it for {him} / around the neck of a snowman / the wind had blown it off "
          "the fence / the snowman looked so cold that {H} gave it a string of red berries instead",
        "- / drum / small round drum / it sounded like rain on a roof / at the bottom of the dry well / it had rolled off the "
          "wall / {F} let down a rope with a hook, and together they pulled up the drum",
        "- / whistle / tin whistle / all the birds answered it / in the pocket of {his} other coat / {he} had put it there and "
          "forgotten all about it / {H} turned red, and then they both laughed until they had to sit down",
     }, {
        "{open} Of all {his} things, {H} loved {his} {fine} the most, because {why}.",
        "{day} the {thing} was gone. {he} looked {spot}. {he} looked {spot}. {sad}",
        "\"{wrong}\" asked {F}. \"I have lost my {thing},\" said {H}. \"[Then we will look for it together|Do not worry, I "
          "will help you|Two can look better than one],\" said {F}.",
        "[On the road they met {M}|Behind the hill they met {M}|Near the bridge they met {M}]. \"Have you seen {a thing}?\" "
          "asked {H}. {M} {think}. \"Look {where},\" {mhe} said.",
        "They ran as fast as they could, and there it was, {where}! {how}. {rescue}.",
        "{joy} \"[Thank you, {F}|You are a true friend, {F}],\" {he} said. [{friends}|{end}]",
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
        "- / read / the letters jumped around like fleas / Read one word and then the next. Nobody is chasing you / the "
          "letters turned into words, and the words turned into a story about a dragon",
        "ps / fly a kite / the kite went up, and then it dived into the nettles / Run against the wind, and let the string out "
          "slowly / the kite climbed higher and higher until it was only a dot in the sky",
     }, {
        "{open} {trait} More than anything, {H} wanted to learn to {skill}.",
        "{day} {he} tried it for the first time. But {fail}. \"[I will never learn it|I am just too small for this|Everyone "
          "can do it but me],\" said {H}. {sad}",
        "[Just then, {M} came along.|But {M} had seen everything.|Nearby sat {M}.] \"[Nobody is born with it|Everyone begins "
          "like that|I fell down too, when I was young],\" said {M}. \"{advice}.\"",
        "{H} tried again, and it went a little better. {he} tried the next day, and the day after that. [Sometimes {he} wanted "
          "to stop, but {he} did not.|Even in {his} dreams {he} kept trying.|]",
        "Then, one {weather} morning, it happened. {success}. {joy} \"Look!\" {he} called. \"I can {skill}!\"",
        "[\"[A long road is made of small steps|Patience is slow, but it gets there],\" said {M}.|The next day, {F} asked, "
          "\"Can you teach me, too?\" And {H} could.|{end}]",
     }},
    // a small animal is helped, and helps in return
    {"creature / trouble / aid / later / back", {
        "ps / bird / it had fallen out of its nest / {H} carried it up the ladder to its nest / {H} lost {his} way in a thick "
          "fog / The bird flew from branch to branch and sang, and {H} followed the song all the way home",
        "ps / bee / it had fallen into a cup of water / {H} let it climb onto a leaf and dried its wings in the sun / a big "
          "angry dog barked at {H} and would not let {him} pass / The bee buzzed around the dog's ears until the dog ran away",
        "ps / frog / it sat in a deep bucket and could not jump out / {H} carried the bucket to the pond and tipped it over / "
          "{H} dropped {P}'s golden ring into the well / The frog dived down into the dark water and came up with the ring in "
          "its mouth",
        "- / pigeon / a string was tied around its leg / {H} cut the string very carefully / a storm took the boat away, and "
          "{H} was alone on the island / The pigeon carried a letter to {P}, who came with a new boat at once",
        "- / spider / the wind had torn its web, and it hung over a puddle / {H} put the spider on a dry branch / {H} tore "
          "{his} best coat on a thorn, just before the feast / The spider mended the coat with silver thread, so fine that "
          "nobody could see the hole",
        "- / pony / it had a sharp stone in its foot / {H} held its leg and pulled out the stone / {H} had to carry a heavy "
          "sack of flour home from the mill / The pony took the sack on its back and carried it up the hill",
        "s / firefly / it was caught under a glass / {H} lifted the glass and opened the window / {H}'s lantern went out in "
          "the middle of the dark forest / The firefly called its brothers and sisters, and together they lit the whole path",
        "aw / lamb / it was caught in a thorn bush / {H} bent back the thorns, one by one / night came, and {H} was still on "
          "the cold mountain / The lamb brought the whole flock, and the sheep kept {him} warm until morning",
     }, {
        "{open} {trait}",
        "{day} {walk}. [Suddenly {he} heard a small voice.|Then {he} heard somebody crying.] \"Help! Please help me!\" It was "
          "a {creature}. {trouble}.",
        "\"[Hold still, I am coming|Do not be afraid|Wait, I will help you],\" said {H}. {aid}. \"[Thank you|You are very "
          "kind],\" said the {creature}. \"[One day I will help you, too|I will not forget this].\" {H} smiled. How could a "
          "{creature} ever help {him}?",
        "[Many weeks later|Some time later|Not long after that], {later}. {he} did not know what to do.",
        "Then {he} heard a voice that {he} knew. It was the {creature}! \"[You helped me, and now I will help you|Now it is my "
          "turn|I told you that I would come],\" it said. {back}.",
        "{joy} [\"That is what friends are for,\" said the {creature}.|\"Kindness always finds its way back,\" said the "
          "{creature}.|At home, {H} told {P} everything. {end}|{end}]",
     }},
    // two friends want the same thing
    {"thing / found / broke / share", {
        "- / swing / {P} hung a swing in the old oak / they both pulled at the swing until one of the ropes broke / They "
          "mended the rope and took turns, ten pushes each",
        "- / cake / {P} gave them one small cake / the cake fell right into the mud / They baked a new cake "
          "together and cut it exactly in the middle",
        "- / wagon / they found an old wagon behind the barn / one wheel came off the wagon and rolled into the river / They "
          "put on a new wheel, and one of them pulled while the other one rode",
        "- / box of paints / they found a box of paints in the attic / the box fell down, and the colors ran over the floor / "
          "They wiped the floor and painted one big picture together",
        "w / sled / they found an old sled in the barn / the sled slid down the hill without them and hit a tree / They nailed "
          "on a new board and rode down the hill, one in front and one behind",
        "- / book / {P} gave them a book about the sea / two pages of the book were torn, right in the middle of the storm / "
          "They glued the pages and read the book aloud, one page each",
        "- / drum / they found a drum at the market / the drum got a hole, and nobody could play it any more / They mended the "
          "skin, and one of them drummed while the other one danced",
        "- / tent / {P} gave them an old tent / the tent tore from top to bottom / They sewed it up again and slept in it side "
          "by side",
     }, {
        "{open} {his} best friend was {fkid}. [They did everything together.|They played together every day.|They had never "
          "had a quarrel.]",
        "{day} {found}. [\"It is mine,\" said {H}. \"No, it is mine,\" said {F}. \"I saw it first!\" cried {H}.|\"I want it,\" "
          "said {H}. \"No, I want it,\" said {F}. \"I said it first!\" cried {H}.|\"Me first,\" said {H}. \"No, me first,\" "
          "said {F}. \"You are always first!\" cried {H}.]",
        "[They pushed and they pulled, and|Nobody wanted to give in, and so] {broke}. [\"Now look what you have done!\" cried "
          "{F}. \"I? You did it!\" cried {H}.|\"This is your fault!\" cried {F}. \"No, it is yours!\" cried {H}.] ^[and|then] "
          "they both went home without another word.",
        "At home, [the house was very quiet|there was nobody to play with|even the clock sounded lonely]. \"{wrong}\" asked "
          "{P}. {H} told {phim} everything. \"[What is worth more, {a thing} or a friend?|Can {a thing} laugh with you?|Who is "
          "more sad now, you or {F}?]\" asked {P}.",
        "In the morning, {H} ran to {F}'s house. But {F} was already coming up the path. \"I am sorry,\" they both said at the "
          "very same moment. Then they had to laugh.",
        "{share}. [It was much more fun than before.|And do you know what? It was twice as good.|\"This is better,\" said {F}, "
          "and {H} thought so, too.] [{friends}|{end}]",
     }},
    // fear, looked at closely
    {"fear / moment / sign / truth / after", {
        "- / the dark / the candle went out, and everything was black / something tall stood in the corner and did not move / "
          "It was only {his} own coat on its hook / {H} gave the coat a bow and said good night to it",
        "s / thunder / a storm came over the hill / the windows shook, and the sky turned white / It was only the clouds, "
          "bumping into each other like big fat sheep / {H} counted the clouds until the storm was far away",
        "- / the dog at the farm / {P} sent {him} to the farm for eggs / the dog came running and barked as loud as it could / "
          "The dog had a thorn in its foot and only wanted help / {H} pulled out the thorn, and the dog licked {his} nose",
        "- / the old house on the hill / {his} ball flew over the wall of the old house / the door creaked, and something "
          "white came out / It was only an old woman in a white apron, with a plate of cookies / the old woman told {him} "
          "stories until supper",
        "- / the attic / {P} sent {him} up to the attic for a blanket / something went tap, tap, tap behind the wall / It was "
          "only a branch of the pear tree, knocking on the window / {H} opened the window and shook hands with the branch",
        "- / the cellar / {P} sent {him} down to the cellar for potatoes / something growled behind the barrels / It was only "
          "the neighbor's old dog, snoring in the potato basket / {H} put a blanket over the dog and left on tiptoe",
        "- / the scarecrow / {he} had to cross the field at sunset / the scarecrow lifted one arm and waved / It was only the "
          "wind, playing with its sleeve / {H} waved back, and since then {he} does it every evening",
        "w / the howling in the chimney / the fire burned low, and {he} was alone in the kitchen / something howled in the "
          "chimney, first low and then high / It was only the wind, who was cold and wanted to come in / {H} howled back, and "
          "it sounded like a song",
     }, {
        "{open} {H} was not afraid of [spiders or mice|wolves or ghosts|rain or snow]. But there was one thing {he} was afraid "
          "of, and that was {fear}.",
        "One {weather} evening, {moment}. {H} [swallowed hard|held {his} breath|stood very still]. Then {sign}. {his} heart "
          "[beat like a drum|jumped like a frog], and {he} wanted to run away.",
        "But {he} remembered what {P} had told {him}. \"[When you bring a light, a shadow gets small|When you are afraid, "
          "count to three and look again].\" So {H} took a deep breath. One. Two. Three. {he} [looked|opened {his} eyes|took "
          "one step closer].",
        "{truth}. {H} began to laugh, first a little and then a lot. \"[Is that all|So it is only you],\" {he} said. And "
          "{after}.",
        "[At home, {P} asked, \"Were you afraid?\" \"Yes,\" said {H}, \"but then I looked.\"|When {H} told {F} about it, {fhe} "
          "said, \"You are the bravest {kid} I know.\"|\"I was afraid,\" {he} told {P}, \"but my fear was bigger than the "
          "thing itself.\"|{end}]",
     }},
    // things vanish in the night
    {"things / first / thief / reason / deal", {
        "- / cookies / two cookies were / a mother rat with six hungry babies / My children are hungry, and it is cold outside "
          "/ {H} put out a plate of crumbs every evening, and no more cookies were missing",
        "- / socks / one sock was / a stork on her nest / My eggs were so cold / {H} gave the stork an old sweater, and soon "
          "there were three little storks in it",
        "s / carrots / three carrots were / a thin gray donkey / Nobody gives me anything but dry straw / {H} planted one more "
          "row of carrots, just for the donkey",
        "- / spoons / one silver spoon was / a young jackdaw / I was lonely, and they shine like stars / {H} gave "
          "the jackdaw one spoon to keep, and every day it came by with the news of the village",
        "a / apples / two red apples were / a pony from the next farm / Nobody ever comes to see me / {H} visited the pony "
          "every Sunday, with one apple in each pocket",
        "- / candles / one candle was / an old bat with a thick book / I love to read, but my eyes are weak / {H} gave the bat "
          "a little lamp, and the bat told {him} all the stories in the book",
        "- / buttons / one button was / a family of beetles / We needed plates for the wedding / {H} let them keep the "
          "buttons, and that night there was tiny music under the floor",
        "- / milk / one cup of milk was / a little stray cat / I have no home / {H} asked {P}, and {P} said yes, and the cat "
          "was called Snow from then on",
     }, {
        "{open} {day} something strange happened. {first} gone. The next morning, it happened again. \"[Did you do that?|Was "
          "it you?]\" asked {P}. \"No,\" said {H}, and it was true.",
        "\"[Maybe it was a ghost|Perhaps there is a thief|How strange],\" said {F}. \"[Then we must catch it|Let us find "
          "out|We "
          "have to keep watch],\" said {H}. That night, the two friends hid behind [the curtain|the big barrel|the kitchen "
          "door] and waited. [The clock struck ten.|{F} was almost asleep.|It was very quiet.]",
        "Suddenly there was a [soft|small|strange] noise. [{H} held {his} breath.|{H} lit the lamp.|] And there they found "
          "{thief}! \"[So it was you|Now we have you]!\" said {F}. \"Why did you take our {things}?\" asked {H}.",
        "\"[I am sorry|Please do not be angry]. {reason},\" was the answer. {F} looked at {H}, and {H} looked at {F}. [They "
          "were not angry any more.|Nobody could be angry about that.]",
        "{deal}. [\"A thief is sometimes only somebody who needs a friend,\" said {P}.|{friends}|{end}|\"It was much nicer "
          "than a ghost,\" said {H}.]",
     }},
    // something breaks, and the truth is hard to say
    {"thing / act / hide / repair", {
        "- / blue vase / {H} played ball in the house, and the ball hit {P}'s blue vase / under the bed / They glued the vase "
          "together with gold paint, and it was even more beautiful than before",
        "- / best teapot / {H} danced through the kitchen and bumped into {P}'s best teapot / behind the flour sack / They "
          "planted a little fern in the broken teapot and put it on the window sill",
        "- / music box / {H} wound up {P}'s music box too hard, and the spring broke / in the drawer / They put in a new "
          "spring, and it played a little slower than before, like a song for sleepy people",
        "- / big mirror / {H} fought a battle against a pillow, and the pillow hit the big mirror / behind the cupboard / They "
          "made a picture of the sun from the pieces, and it threw spots of light all over the room",
        "- / glasses / {H} sat down on {P}'s glasses / in the sugar pot / They mended the glasses with a piece of red wire, "
          "and {P} said that {phe} could see better than ever",
        "- / honey pot / {H} wanted just one spoon of honey and dropped the whole honey pot / under the stairs / They swept "
          "the floor, washed their sticky {hand}s, and made a new pot out of clay",
        "- / fishing rod / {H} used {P}'s fishing rod as a sword, and it broke in two / in the haystack / They cut a new rod "
          "from the hazel bush and went fishing together",
        "- / clock / {H} wanted to see how the clock worked, and then {he} could not put it together again / inside a boot / "
          "They put the wheels back, one by one, until the clock ticked again",
     }, {
        "{open} {trait}",
        "{day} {H} was alone at home. \"[Be good|Take care of the house|I will be back soon],\" {P} had said. But {act}. \"Oh "
          "no,\" whispered {H}. \"{P} will be so angry.\" Quickly {he} picked everything up and hid it {hide}.",
        "When {P} came home, {phe} asked, \"Was everything all right?\" \"Yes,\" said {H}. But [the soup did not taste "
          "good|{he} could not look at {phim}|{his} supper tasted like sand]. [The word lay in {his} belly like a stone.|The "
          "lie sat on {his} shoulder like a heavy bird.] That night, {H} could not sleep.",
        "In the morning, {he} went to {P}, and {his} voice was very small. \"I broke your {thing},\" {he} said, \"and I told a "
          "lie. I am sorry.\"",
        "{P} was silent for a moment. Then {phe} [took {him} in {phis} arms|sat down beside {him}|stroked {his} head]. \"[I am "
          "glad that you told me|Things can break, but your word should stay whole|That was hard, and I am proud of you],\" "
          "{phe} said. \"Come, let us see what we can do.\"",
        "{repair}. {joy} [That night, {H} fell asleep at once.|\"The truth is light,\" thought {H}, \"and a lie is "
          "heavy.\"|{end}]",
     }},
    // a birthday that everybody seems to forget
    {"gift / sign / place", {
        "- / a new drum / a strange knocking from the shed / the barn, which was full of lights",
        "- / a tree house / the sound of hammers / the old oak, where everyone stood and waved",
        "- / a fiddle / soft music behind the hedge / the meadow, where a long table stood under the trees",
        "- / a cake as tall as {H} / the smell of sugar / the kitchen, which was full of friends",
        "- / a blue boat / blue paint on {F}'s nose / the pond, where lanterns hung in every tree",
        "- / a map of the whole world / a spot of ink on {F}'s {fhand} / the school, where everybody was hiding under the "
          "tables",
        "- / a bicycle with a red bell / a short ring behind the wall / the market square, where all the neighbors were "
          "waiting",
        "- / a puppy with one white ear / a small bark behind the door / the garden, where everyone was trying not to laugh",
     }, {
        "{open} Today was {his} birthday. {he} was so excited that {he} could hardly eat.",
        "But {P} only said, \"[Good morning. Please bring in some wood|Good morning. Eat your porridge before it gets cold|Oh, "
          "you are up early].\" There was no cake and no song. {sad}",
        "{H} went to see {F}. \"Do you know what day it is?\" {he} asked. \"[Of course|Yes, I do],\" said {F}. \"It is "
          "[washing day|market day|a good day for sleeping].\" And {fhe} closed the door [very quickly|in a hurry]. {H} "
          "noticed {sign}, but {he} was too sad to think about it.",
        "When the sun was low, {F} came running. \"[Come quickly, we need your help|Hurry, something has happened]!\" {fhe} "
          "called. {H} wiped {his} eyes and followed {fhim} to {place}.",
        "\"Surprise!\" they all shouted. \"Happy birthday, {H}!\" There was {P}, and there was {M}, too. And there was a "
          "present from all of them: {gift}. {joy}",
        "\"I thought you had forgotten me,\" said {H}. \"[Forgotten?|You?]\" said {P} and laughed. \"[We have been planning it "
          "for weeks|It was so hard to say nothing].\" They ate {meal} and sang until midnight.",
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
          "white and pink, and there was one single apple / {he} cut the apple into four pieces and shared it with all {his} "
          "friends",
        "ps / rose bush / a dry little stick / {he} shouted at it to hurry up / it had one red rose that smelled of summer / "
          "{he} gave the rose to {P}, who put it in the best glass",
        "ps / strawberry plant / a seed as small as dust / {he} put a warm blanket on it / it had seven red berries / {he} ate "
          "only one of the berries and gave away the others, and that one tasted best of all",
        "ps / melon / a slippery black seed / {he} sang loud songs to it at midnight / it was round and heavy and sweet as "
          "honey / {he} cut the melon and invited everybody who had waited with {him}",
        "ps / cherry tree / a cherry stone / {he} told it that it was already late / it was as tall as {H}, and its branches "
          "were full of white flowers / {he} hung a swing on the cherry tree, many years later",
     }, {
        "{open} {trait} {day} {P} gave {him} {seed}. \"[What is it?|Is it something to eat?]\" asked {H}. \"[Plant it and "
          "wait|It is a secret, and only the earth knows it],\" said {P}.",
        "{H} put it into the ground and gave it some water. Then {he} sat down beside it. [{he} waited for one whole "
          "hour.|{he} waited until supper.] Nothing happened. The next day, {trick}. \"[It is too slow|I cannot wait any "
          "longer]!\" said {H}.",
        "[Then {M} came along.|{M} looked over the fence.] \"[A seed has its own clock|You cannot hurry the sun, and you "
          "cannot hurry a seed],\" said {M}. \"[Give it water, give it light, and give it time|Do a little every day, and "
          "leave the rest to the rain].\"",
        "So {H} learned to wait. Every morning {he} gave it a little water. [When it rained, {he} was glad.|{he} pulled out "
          "the weeds.|{he} told it stories.] And while {he} waited, {he} [built a bench|learned a song|read three books].",
        "Then, one morning, there was a tiny green point in the earth. \"Good morning!\" said {H}. It grew and grew. It was {a "
          "plant}! And in the end, {grown}. {joy}",
        "And {H}? ^{gift}. [\"[It was worth the wait|Good things take their time],\" said {P}.|\"It grew,\" said {H}, \"and I "
          "think I grew a little, too.\"|{end}]",
     }},
    // one wish, and what to do with it
    {"magic / spirit / first / second / wish / result", {
        "- / a dusty lamp / a tiny man made of smoke / a mountain of candy / a golden coach / that {P} would be well again / "
          "{P} got up, opened all the windows, and began to dance",
        "- / a green bottle / an old voice that smelled of salt / a crown / a castle with a hundred rooms / that all the nets "
          "in the village would be full / silver fish jumped over the sides of the boats",
        "- / a smooth white stone / a voice as soft as snow / a bag of gold / wings / that the lost boat would come home / a "
          "white sail came around the rocks, and all the people ran down to the beach",
        "- / a little silver bell / a fairy no bigger than a thumb / a hundred toys / a horse that could fly / that it would "
          "rain on the dry fields / big warm drops fell from the sky, and the whole village danced in the rain",
        "- / a feather that shone in the dark / a bird made of light / a ship with white sails / a kingdom / that the lost "
          "birds would find their way home / a long line of birds came over the hill, and they sang all night",
        "w / a snowflake that did not melt / the queen of the snow / a palace of ice / shoes of silver / that the old people "
          "would have warm houses / every chimney began to smoke, and there was light in all the windows",
        "- / an old coin with a star on it / the man in the moon / all the money in the world / a house on the moon / that "
          "{he} could always make {P} laugh / {P} laughed until {phe} had to hold on to the table",
        "- / a blue glass marble / a sleepy little wizard / a room full of marbles / a talking book / for one new friend / "
          "there was a new voice at the gate, asking, \"Can I play with you?\"",
     }, {
        "{open} {trait}",
        "{day} {walk}. There in the grass lay {magic}. {H} picked it up. Suddenly there was {spirit}. \"[You have found me|You "
          "have woken me up],\" said the voice. \"You may make one wish. But only one, so think well.\"",
        "\"I could wish for {first},\" thought {H}. \"But [that would soon be gone|what would I do with it|who would I share "
          "it with]?\" Then {he} thought, \"I could wish for {second}.\" But that did not feel right, either.",
        "{he} asked {F}. \"[Wish for something big|Take the gold]!\" said {F}. {he} asked {M}. \"[Wish for what you would give "
          "away|The best wish is the one you do not keep for yourself],\" said {M}.",
        "Then {he} knew it. \"I wish {wish},\" said {H}. \"[That is a good wish|In a thousand years, nobody has asked for "
          "that],\" said the voice. In the morning, {result}. {joy}",
        "[\"Are you not sad that your wish is gone?\" asked {F}. \"No,\" said {H}, \"it is not gone. It is "
          "everywhere.\"|{end}|Nobody ever heard the voice again. But {H} did not need it any more.]",
     }},
    // someone new
    {"odd / guess / deed / game", {
        "- / carried a big black box everywhere / There must be a monster in that box / there was an accordion in the box, and "
          "it could laugh and cry / made music",
        "- / never said a word / That is not very polite / {F} spoke another language and did not know the words yet / taught "
          "each other new words",
        "- / always wore a thick scarf, even in the sun / Maybe there is no neck under it / {F} had got the scarf from {fhis} "
          "grandmother, who lived far away / wrote letters to {fhis} grandmother",
        "- / went into the forest every evening / That cannot be anything good / {F} was feeding a lamb that had no mother / "
          "brought milk to the lamb",
        "- / looked at the ground all the time / Somebody must have lost a treasure there / {F} was collecting stones with "
          "tiny shells in them / collected stones",
        "- / slept all day and walked around at night / Only thieves do that / {F} knew the names of all the stars / watched "
          "the stars from the roof",
        "- / talked to the trees / Trees cannot hear / {F} was practicing for a play and needed someone to listen / put on "
          "plays in the barn",
        "- / had paint on both ears / Nobody washes there / {F} was painting birds on every wall of the house / painted a "
          "whole wall together",
     }, {
        "{open} {day} somebody new moved into the empty house next door. It was {fkid}.",
        "But {F} was strange. {fhe} {odd}. \"[{guess}|Be careful. {guess}],\" said the others. [They kept away from the "
          "house.|Nobody said hello.] {H} kept away, too, but {he} [wondered|was curious|did not feel good about it].",
        "\"Have you ever spoken to {fhim}?\" asked {P}. \"No,\" said {H}. \"[Then how can you know?|A closed book tells no "
          "story],\" said {P}. [\"Go and say hello.\"|\"Somebody has to say hello first.\"|]",
        "So {H} [took a plate of cookies|picked some flowers|took two apples] and went next door. {he} knocked, and {his} "
          "heart beat fast. \"I am {H},\" {he} said. \"[This is for you|I live over there].\" {F} [smiled|opened the door "
          "wide|blushed]. \"[You are the first one who has come|I was hoping that somebody would come],\" {fhe} said.",
        "And then {H} found out why. {deed}. \"Why did you never tell anyone?\" asked {H}. \"Nobody asked,\" said {F}.",
        "The next day they {game}, and the day after that, too. [One after the other, the neighbors came and joined in.|] "
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
          "{P} was snoring.",
        "So {he} opened the window and looked out. [The whole world was dark and still.|Far away, a dog barked once.] \"[Is "
          "anybody awake?|Does nobody hear me?]\" {he} asked softly. \"I am,\" said {call}.",
        "{H} was not afraid, for the voice was [old and kind|as soft as wool|deep and quiet]. \"I cannot sleep,\" {he} said. "
          "\"[I know|That happens],\" said {call}. \"{answer}.\"",
        "{H} lay down again and listened. {he} thought of [{meal}|the green hills], and of [{F}|{P}], and of [the long road by "
          "the river|a boat with a white sail]. {his} eyes grew heavy. \"[Are you still there?|Will you stay?]\" {he} "
          "whispered. \"[Always|All night],\" said {call}.",
        "But {H} did not hear the answer any more. [{he} was fast asleep.|{he} was already far away, in the land of dreams.] "
          "[And when {F} could not sleep the next night, {H} knew exactly what to say.|And if you cannot sleep one night, open "
          "your window and ask.|]",
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
        "{open} {trait} \"[Do not go too far|Stay where you can see the house],\" said {P} every morning.",
        "But {day} {reason}. Before {he} knew it, {he} was far away from home. Then {danger}. {H} was lost. \"[Hello!|Is "
          "anybody there?]\" {he} called. Nobody answered. {sad}",
        "[Under a tree sat {M}.|Then {he} saw {M}.] \"Please, which way is home?\" asked {H}. \"[I do not know where you "
          "live|I cannot walk so far with you],\" said {M}, \"but I know this. The one who runs gets more lost. [Stop, and "
          "think of what you know about home|Look for something that does not move].\"",
        "So {H} took a deep breath. {trick}. And then {he} noticed it: {sign}! \"That way!\" cried {H}. Step by step {he} "
          "followed it.",
        "[There was the gate.|There was the door.] {P} came running and [held {him} tight|lifted {him} up high]. \"[How did "
          "you find the way?|Who showed you the way?]\" {phe} asked. \"I stopped running,\" said {H}, \"and then home found "
          "me.\"",
        "For supper they had {meal}. {end}",
     }},
};
// clang-format on

// ---------------------------------------------------------------------------------------------------------------------
// telling

enum {
    NUM_PLOTS = sizeof plots / sizeof plots[0],
    NUM_CASTS = sizeof casts / sizeof casts[0],
    NUM_LISTS = sizeof lists / sizeof lists[0]
};

typedef struct {
    uint64_t seed;
    uint32_t number;  // of the story
    uint64_t draws;
    const char* fact_names[MAX_FACTS];
    char fact_names_buf[MAX_FACT];  // the field names of the plot, each ended by a NUL
    char facts[MAX_FACTS][MAX_FACT];
    int num_facts;
    uint32_t used[NUM_LISTS];  // bit i: line i has been used
    bool met_friend, met_elder;
    bool capital;  // the next letter starts a sentence
    char text[MAX_STORY];
    size_t length;
} Story;

/* Draws a number in [0, n). */
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
    if (c == ' ' && (last == ' ' || last == '\n')) { return; }             // an empty choice leaves no double space
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

/* Draws a line of list i that this story has not used yet; starts over if all are used. */
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

/* Writes {name}. */
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
    if (!value) { die("story %u: {%.*s} is neither a fact nor a list", s->number, (int)n, name); }
    if (article) {
        put(s, 'a');
        if (strchr("aeiou", value[0])) { put(s, 'n'); }
        put(s, ' ');
    }
    tell(s, value, value + strlen(value), depth + 1);
}

/* Returns the bracket that closes the one at t. */
static const char* closing(const char* t, const char* end) {
    int level = 0;
    for (; t < end; t++) {
        level += (*t == '[') - (*t == ']');
        if (level == 0) { return t; }
    }
    die("a bracket is not closed: %.60s", t);
}

/* Draws one of the choices between t and end, and writes it. */
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

/* Cuts "a / b / c" at its slashes; returns the number of parts. */
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

/* Returns whether the row has the animal as a word, also in the plural ("owls"), but not as part of another word ("pillow"). */
static bool plays_in(const char* kind, const char* row) {
    if (!kind) { return false; }
    const char* word = last_word(kind);
    for (const char* p = strstr(row, word); p; p = strstr(p + 1, word)) {
        char after = p[strlen(word)];
        if ((p == row || p[-1] == ' ') && (after == 's' || after < 'a')) { return true; }
    }
    return false;
}

static const char* article(const char* phrase) { return strchr("aeiou", phrase[0]) ? "an" : "a"; }

static const char* what_is(const Person* p, const char* kind) { return kind ? kind : p->gender == 'f' ? "girl" : "boy"; }

static void know_cast(Story* s, const Cast* c, const char* row) {
    char phrase[MAX_FACT];
    if (plays_in(c->kind, row) || plays_in(c->friend_kind, row) || plays_in(c->elder.name, row)) {
        die("%s: hero, friend or elder plays another part in this row: %.60s", c->hero.name, row);
    }
    const char *hero_is = what_is(&c->hero, c->kind), *friend_is = what_is(&c->pal, c->friend_kind);
    know(s, "H", c->hero.name);
    know_pronouns(s, c->hero.gender, "he", "him", "his");
    know(s, "kid", hero_is);
    know(s, "hand", c->kind ? "paw" : "hand");
    snprintf(phrase, sizeof phrase, "%s %s %s named %s", article(c->adjective), c->adjective, hero_is, c->hero.name);
    know(s, "intro", phrase);
    know(s, "trait", c->trait);
    know(s, "home", c->home);
    know(s, "F", c->pal.name);
    know_pronouns(s, c->pal.gender, "fhe", "fhim", "fhis");
    know(s, "fhand", c->friend_kind ? "paw" : "hand");
    snprintf(phrase, sizeof phrase, c->friend_kind ? "%s the %s" : "%s from next door", c->pal.name, friend_is);
    know(s, "friend", phrase);
    snprintf(phrase, sizeof phrase, "%s %s named %s", article(friend_is), friend_is, c->pal.name);
    know(s, "fkid", phrase);
    snprintf(phrase, sizeof phrase, "the %s", c->elder.name);
    know(s, "M", phrase);
    snprintf(phrase, sizeof phrase, "%s %s", article(c->elder.name), c->elder.name);
    know(s, "elder", phrase);
    know_pronouns(s, c->elder.gender, "mhe", "mhim", "mhis");
    know(s, "P", c->family.name);
    know_pronouns(s, c->family.gender, "phe", "phim", "phis");
}

static void draw_season(Story* s, const char* letters) {
    int season;
    do { season = draw(s, 4); } while (letters[0] != '-' && !memchr(letters, season_letters[season], strcspn(letters, " ")));
    know(s, "season", season_names[season]);
    know(s, "weather", weathers[season]);
}

static void tell_story(Story* s, uint64_t seed, uint32_t number) {
    memset(s, 0, sizeof *s);
    s->seed = seed;
    s->number = number;
    s->capital = true;
    const int plot_number = draw(s, NUM_PLOTS), cast_number = draw(s, NUM_CASTS);
    const Plot* plot = &plots[plot_number];
    const Cast* cast = &casts[cast_number];
    const char* row = plot->rows[(plot_number + cast_number) % count_lines(plot->rows)];
    const char *keys[16], *fields[17];
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
    know_cast(s, cast, row);
    for (int i = 0; plot->beats[i]; i++) {
        const char* beat = plot->beats[i];
        if (s->length) { put(s, '\n'); }
        tell(s, beat, beat + strlen(beat), 0);
    }
    while (s->length && s->text[s->length - 1] == ' ') { s->length--; }
    s->text[s->length] = 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// the program

/* Writes a text as the inside of a JSON string. */
static void write_inside(FILE* f, const char* text) {
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') { fputc('\\', f); }
        if (*text == '\n') {
            fputs("\\n", f);
        } else {
            fputc(*text, f);
        }
    }
}

static void write_json(FILE* f, const Story* s, const char* end) {
    fputs("{\"text\": \"", f);
    write_inside(f, s->text);
    write_inside(f, end);
    fputs("\"}\n", f);
}

static uint64_t parse_number(const char* flag, const char* text, uint64_t min, uint64_t max) {
    char* end = NULL;
    errno = 0;
    unsigned long long v = text ? strtoull(text, &end, 10) : 0;
    if (!text || end == text || *end || errno || text[0] == '-' || v < min || v > max) {
        die_usage("%s is %s, wanted a whole number from %llu to %llu", flag, text ? text : "missing", (unsigned long long)min,
                  (unsigned long long)max);
    }
    return v;
}

int main(int argc, char** argv) {
    const char* const usage =
        "usage: tinytales [--stories N] [--seed S] [--end TEXT] [--text] [-o FILE]\n"
        "  --stories N  number of stories (default 8000, about 8 MB)\n"
        "  --seed S     seed; another seed gives other stories (default 1)\n"
        "  --end TEXT   write this behind each story, such as the name of a special token\n"
        "  --text       write plain text with an empty line between stories, not {\"text\": ...} lines\n"
        "  -o FILE      file to write (default: standard output)\n";
    uint64_t stories = DEFAULT_STORIES, seed = 1;
    const char *path = NULL, *end = "";
    bool plain = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--stories") == 0) {
            stories = parse_number(argv[i], argv[i + 1], 1, UINT32_MAX);
            i++;
        } else if (strcmp(argv[i], "--seed") == 0) {
            seed = parse_number(argv[i], argv[i + 1], 0, UINT64_MAX);
            i++;
        } else if (strcmp(argv[i], "--end") == 0 && i + 1 < argc) {
            end = argv[++i];
        } else if (strcmp(argv[i], "--text") == 0) {
            plain = true;
        } else if (strcmp(argv[i], "-o") == 0 && i + 1 < argc) {
            path = argv[++i];
        } else if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(usage, stdout);
            return 0;
        } else {
            die_usage("%s: unknown or incomplete flag\n  hint: --help shows the usage", argv[i]);
        }
    }
    FILE* f = path ? fopen(path, "wb") : stdout;
    if (!f) { die("%s: cannot write: %s", path, strerror(errno)); }
    Story* s = (Story*)xmalloc(sizeof *s);
    for (uint64_t i = 0; i < stories; i++) {
        tell_story(s, seed, (uint32_t)i);
        if (plain) {
            fprintf(f, "%s%s%s\n", i ? "\n" : "", s->text, end);
        } else {
            write_json(f, s, end);
        }
    }
    free(s);
    bool ok = fflush(f) == 0 && !ferror(f);
    if (path) { ok = fclose(f) == 0 && ok; }
    if (!ok) { die("%s: writing failed: %s", path ? path : "standard output", strerror(errno)); }
    return 0;
}
