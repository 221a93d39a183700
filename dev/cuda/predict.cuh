/* predict.cuh -- the predictions of the zoo without a measurement: by the rates of any card, for any shape, term by term; and
 * again for each row of a file of results, which must have been predicted so. A line of JSON has the rates, see cards.json.
 * No kernel runs, so a build for the emulated card predicts for every other card.
 */
#ifndef ZOO_PREDICT_CUH
#define ZOO_PREDICT_CUH

#include <fstream>

#include "dev/cuda/zoo.cuh"

static const char* const CARDS = "dev/cuda/cards.json";

/* Returns the number, or the text, of a key in a line of JSON; `otherwise` if it has no such key. */
static double number_of(const std::string& line, const std::string& key, double otherwise) {
    const size_t at = line.find("\"" + key + "\":");
    return at == std::string::npos ? otherwise : strtod(line.c_str() + at + key.size() + 3, NULL);
}
static std::string text_of(const std::string& line, const std::string& key, const std::string& otherwise = "") {
    const size_t at = line.find("\"" + key + "\": \"");
    if (at == std::string::npos) { return otherwise; }
    const size_t from = at + key.size() + 5;
    return line.substr(from, line.find('"', from) - from);
}

/* Takes the rates that a line has. A line of results has its copy, and version 0 of a ladder the rate of products. */
static void read_rates(const std::string& line) {
    card.copy = number_of(line, "copy", card.copy);
    card.lanes = number_of(line, "lanes", card.lanes);
    card.trip = number_of(line, "trip", card.trip);
    card.launch = number_of(line, "launch", card.launch);
    card.product = number_of(line, std::string("product_") + PRECISION_NAME, card.product);
    if (number_of(line, "version", 1) == 0) { card.product = number_of(line, "rate", card.product); }
    card.sms = number_of(line, "sms", card.sms);
    card.cache = number_of(line, "cache", card.cache);
    card.major = (int)number_of(line, "major", card.major);
}

/* Appends the rates of this run, a line before its rows. */
static void write_rates(FILE* json, const char* file, int arch) {
    char gpu[256];
    device_name(gpu);
    fprintf(json, "{\"gpu\": \"%s\", \"arch\": %d, \"precision\": \"%s\", \"file\": \"%s\", ", gpu, arch, PRECISION_NAME, file);
    fprintf(json, "\"copy\": %.5g, \"lanes\": %.5g, \"trip\": %.5g, \"launch\": %.5g, ", card.copy, card.lanes, card.trip,
            card.launch);
    fprintf(json, "\"sms\": %.0f, \"cache\": %.0f, \"major\": %d}\n", sms(), card.cache, card.major);
}

/* Reads the sizes of a shape, up to 6; returns what follows them. */
static const char* read_sizes(const char* text, Shape* shape) {
    char* rest = (char*)text;
    for (int k = 0; k < 6 && isdigit(*rest); k++) {
        shape->n[k] = strtoull(rest, &rest, 10);
        rest += *rest == ',';
    }
    return rest;
}

/* Predicts each row of the results of this file and precision anew, by the rates of its run. Each is a test. */
static void predict_again(const std::vector<std::string>& lines, const char* file, const std::vector<Ladder>& ladders) {
    for (const std::string& line : lines) {
        if (text_of(line, "file") != file || text_of(line, "precision") != PRECISION_NAME) { continue; }
        read_rates(line);
        const std::string sizes = text_of(line, "sizes"), name = text_of(line, "ladder");
        for (const Ladder& l : ladders) {
            Shape shape = {};
            if (name != l.name || *read_sizes(sizes.c_str() + sizes.find('=') + 1, &shape)) { continue; }
            Case c = {shape.n, false, {}, 0, 0};
            l.make(c);
            for (const Version& v : l.versions) {
                if (number_of(line, "version", -1) != v.number || text_of(line, "idea") != v.idea || v.flags & ON_HOST) {
                    continue;
                }
                const double now[2] = {1e3 * seconds_of(work_of(v, c)), v.correct ? 1e3 * seconds_of(v.correct(c)) : 0};
                const double then[2] = {number_of(line, "predicted", 0), number_of(line, "corrected", 0)};
                for (int k = 0; k < 2; k++) {
                    CHECK(fabs(now[k] - then[k]) <= 1e-3 * then[k], "%s %d at %s: %s is %.5g ms, the results have %.5g", l.name,
                          v.number, sizes.c_str(), k ? "corrected" : "predicted", now[k], then[k]);
                }
                test_count((name + " " + std::to_string(v.number) + " at " + sizes + " is predicted again").c_str());
            }
        }
    }
}

/* Prints the terms of each version at a shape, in ms. */
static void predict_ladder(const Ladder& l, const std::vector<int>& numbers, const Shape& s, int arch) {
    Case c = {s.n, false, {}, 0, 0};
    l.make(c);
    printf("%-44s %9s %9s %9s %9s %9s %9s %10s\n", "", "memory", "trips", "lanes", "products", "launches", "more", "predicted");
    for (const Version& v : l.versions) {
        if (v.flags & ON_HOST) {
            printf("%2d %s: no prediction, the rate of the host's link is measured\n", v.number, v.idea);
            continue;
        }
        if (lacks(v, arch) || (!numbers.empty() && !std::count(numbers.begin(), numbers.end(), v.number))) { continue; }
        for (int again = 0; again < (v.correct ? 2 : 1); again++) {
            const Terms t = terms_of(again ? v.correct(c) : work_of(v, c));
            const double terms[6] = {t.memory, t.trips, t.lanes, t.products, t.launches, t.more};
            const int most = (int)(std::max_element(terms, terms + 4) - terms);
            printf("%2d %-41.41s", v.number, again ? "  corrected after it was measured" : v.idea);
            for (int k = 0; k < 6; k++) { printf(" %8.4g%c", 1e3 * terms[k], k == most ? '*' : ' '); }
            printf(" %9.4g\n", 1e3 * t.seconds());
        }
    }
}

/* `--predict CARD`: a name in cards.json, or a file: one with the rates of a card, or with results. With results and no shape,
 * their predictions are made again. Returns the exit status. */
static int predict(const char* of, const char* file, const std::vector<Ladder>& ladders, const char* ladder,
                   const std::vector<int>& numbers, const char* shape, const Shape& own) {
    const bool is_file = strstr(of, ".json") != NULL;
    card.product = INFINITY;  // unless the file has a rate: a run of a layer without products has none
    std::ifstream in(is_file ? of : CARDS);
    if (!in) {
        die("%s: can't be opened: %s\n  hint: run it in the root of the repository", is_file ? of : CARDS, strerror(errno));
    }
    std::vector<std::string> lines;
    std::string gpu, about, names;
    bool results = false;
    for (std::string line; std::getline(in, line);) {
        const std::string name = text_of(line, "gpu");
        names += name.empty() || is_file ? "" : ", " + name;
        if (name.empty() || (!is_file && (" " + name + " ").find(" " + std::string(of) + " ") == std::string::npos)) {
            continue;
        }
        lines.push_back(line);
        results |= !text_of(line, "ladder").empty();
        gpu = name, about = text_of(line, "about", about);
        if (!results || text_of(line, "precision") == PRECISION_NAME) { read_rates(line); }
    }
    if (gpu.empty()) {
        die("--predict %s: no such card in %s%s%s", of, is_file ? "that file" : CARDS, is_file ? "" : ", which has",
            names.c_str() + !is_file);
    }
    if (results && !shape) {
        predict_again(lines, file, ladders);
        return test_summary();
    }
    if (card.trip <= 0) { die("--predict %s: the file has no rates of a card\n  hint: %s has some to begin with", of, CARDS); }
    if (card.product == 0) {
        die("--predict %s: the card has no %s\n  hint: build with another precision", of, PRECISION_NAME);
    }
    printf("%s%s%s\n", gpu.c_str(), about.empty() ? "" : ": ", about.c_str());
    printf("copy %.4g GB/s, a trip %.4g ns, a launch %.3g us, %.4g G instructions/s of threads, products %.4g TFLOP/s in %s\n",
           1e-9 * card.copy, 1e9 * card.trip, 1e6 * card.launch, 1e-9 * card.lanes, 1e-12 * card.product, PRECISION_NAME);
    std::string left_out;
    int predicted = 0;
    for (const Ladder& l : ladders) {
        if (ladder && strcmp(ladder, l.name)) { continue; }
        std::vector<Shape> shapes = own.n[0] ? std::vector<Shape>(1, own) : l.classic;
        if (!own.n[0] && (!shape || strcmp(shape, "classic"))) {
            if (shape) { shapes.clear(); }
            shapes.insert(shapes.end(), l.large.begin(), l.large.end());
        }
        const size_t wanted = 1 + (size_t)std::count(l.sizes, l.sizes + strlen(l.sizes), ',');
        for (const Shape& s : shapes) {
            const size_t given = 6 - (size_t)std::count(s.n, s.n + 6, (size_t)0);
            std::string sizes = sizes_of(l, s);
            if (given != wanted) {
                left_out += "; " + std::string(l.name) + " takes the sizes " + l.sizes;
                continue;
            }
            predicted++;
            printf("\n%s %s %s, ms; the greatest of four (*), launches and more add up\n", file, l.name, sizes.c_str());
            predict_ladder(l, numbers, s, card.major == 7 ? 75 : card.major == 9 ? 90 : 80);
        }
    }
    if (!predicted) { die("%s: no prediction for %s%s", file, shape ? shape : "it", left_out.c_str()); }
    if (!left_out.empty()) { printf("\nleft out%s\n", left_out.c_str()); }
    return 0;
}

#endif
