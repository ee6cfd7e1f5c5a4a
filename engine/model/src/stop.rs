//! Stop strings in streamed text.
//!
//! Invariants, for every way to cut the text into pieces:
//! - Emitted text contains no stop string, nor any part of the stop string that ended the text,
//!   unless the request includes it.
//! - The text held back is shorter than the longest stop string.

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopStep {
    pub text: String,
    pub stopped: bool,
}

/// Finds the first stop string in text that arrives in pieces. Text that may be the beginning of a
/// stop string is held back until the next piece decides.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The stop string is a part of the text.
    is_included: bool,
    held: String,
    stopped: bool,
}

impl StopMatcher {
    /// Creates a matcher for `stops`. Ignores empty strings, which would match everywhere. With
    /// `is_included`, the text ends after the stop string instead of before it.
    pub fn new(mut stops: Vec<String>, is_included: bool) -> StopMatcher {
        stops.retain(|stop| !stop.is_empty());
        StopMatcher { stops, is_included, held: String::new(), stopped: false }
    }

    /// Takes the next piece. Emits nothing after a stop.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.stopped {
            return StopStep { text: String::new(), stopped: true };
        }
        self.held.push_str(text);
        let matches = self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop.len())));
        if let Some((at, len)) = matches.min() {
            self.stopped = true;
            self.held.truncate(if self.is_included { at + len } else { at });
            return StopStep { text: std::mem::take(&mut self.held), stopped: true };
        }
        let keep_from = self.held.len() - self.partial_match_len();
        let tail = self.held.split_off(keep_from);
        StopStep { text: std::mem::replace(&mut self.held, tail), stopped: false }
    }

    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length of the held-back suffix that may begin a stop string, in bytes.
    fn partial_match_len(&self) -> usize {
        let longest = |stop: &String| {
            let longest_prefix = (stop.len() - 1).min(self.held.len());
            (1..=longest_prefix).rev().find(|&len| self.held.as_bytes().ends_with(&stop.as_bytes()[..len])).unwrap_or(0)
        };
        let bytes = self.stops.iter().map(longest).max().unwrap_or(0);
        // The match may end inside a character that both strings begin alike. Hold back the whole
        // character.
        (bytes..=self.held.len()).find(|&len| self.held.is_char_boundary(self.held.len() - len)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()).collect(), false);
        let mut out = String::new();
        for piece in pieces {
            let step = matcher.push(piece);
            out.push_str(&step.text);
            if step.stopped {
                return (out, true);
            }
        }
        out.push_str(&matcher.finish());
        (out, false)
    }

    #[test]
    fn earliest_stop_ends_the_text_for_every_way_to_cut_it() {
        let text = "naïve user: hello\nUser: bye é";
        let cuts: Vec<usize> = (0..=text.len()).filter(|&at| text.is_char_boundary(at)).collect();
        for &a in &cuts {
            for &b in cuts.iter().filter(|&&b| b >= a) {
                let pieces = [&text[..a], &text[a..b], &text[b..]];
                assert_eq!(run(&["User:", "\nUser"], &pieces), ("naïve user: hello".into(), true));
                assert_eq!(run(&["nothing", "é!"], &pieces), (text.into(), false));
                assert_eq!(run(&[""], &pieces), (text.into(), false));
            }
        }
    }

    #[test]
    fn push_holds_back_only_a_partial_match() {
        let mut matcher = StopMatcher::new(vec!["STOP".into(), "ést".into()], false);
        assert_eq!(matcher.push("abc S").text, "abc ");
        assert_eq!(matcher.push("TO").text, "");
        assert_eq!(matcher.push("x").text, "STOx");
        // 'è' shares its first byte with 'é' but is a whole other character.
        assert_eq!(matcher.push("è").text, "è");
        assert_eq!(matcher.push("é").text, "");
        assert_eq!(matcher.finish(), "é");
    }

    #[test]
    fn included_stop_string_ends_the_text() {
        let mut matcher = StopMatcher::new(vec!["STOP".into()], true);
        assert_eq!(matcher.push("abc ST").text, "abc ");
        assert_eq!(matcher.push("OP def"), StopStep { text: "STOP".into(), stopped: true });
    }
}
