//! Patterns of `SCAN` and `CONFIG GET`: `*`, `?`, `[a-z]`, `[^a]` and `\`.

/// Returns `true` if `pattern` matches all of `text`. Takes at most as many steps as the product of
/// both lengths, whatever the pattern.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut rest, mut at) = (pattern, 0);
    // Pattern behind the last star, and the first byte that the star has not tried to skip. Only
    // the last star needs another try: an earlier one could not match more.
    let mut star: Option<(&[u8], usize)> = None;
    loop {
        if let Some(behind) = rest.strip_prefix(b"*") {
            star = Some((behind, at));
            rest = behind;
            continue;
        }
        if at == text.len() && rest.is_empty() {
            return true;
        }
        let matched = text.get(at).and_then(|&byte| match_one(rest, byte));
        if let Some(behind) = matched {
            rest = behind;
            at += 1;
            continue;
        }
        match star {
            Some((behind, skipped)) if skipped < text.len() => {
                star = Some((behind, skipped + 1));
                rest = behind;
                at = skipped + 1;
            }
            _ => return false,
        }
    }
}

/// Returns the pattern behind its first element if that matches `byte`.
fn match_one(pattern: &[u8], byte: u8) -> Option<&[u8]> {
    let (&first, rest) = pattern.split_first()?;
    match first {
        b'?' => Some(rest),
        b'[' => match_class(rest, byte),
        b'\\' if !rest.is_empty() => (rest[0] == byte).then(|| &rest[1..]),
        literal => (literal == byte).then_some(rest),
    }
}

/// Returns the pattern behind a class if the class has `byte`. A class without an end goes to the
/// end of the pattern, as in Redis.
fn match_class(class: &[u8], byte: u8) -> Option<&[u8]> {
    let (is_negated, mut rest) = match class.strip_prefix(b"^") {
        Some(rest) => (true, rest),
        None => (false, class),
    };
    let mut found = false;
    loop {
        rest = match rest {
            [] => break,
            [b']', behind @ ..] => {
                rest = behind;
                break;
            }
            [b'\\', literal, behind @ ..] => {
                found |= *literal == byte;
                behind
            }
            [from, b'-', to, behind @ ..] => {
                found |= (*from.min(to)..=*from.max(to)).contains(&byte);
                behind
            }
            [literal, behind @ ..] => {
                found |= *literal == byte;
                behind
            }
        };
    }
    (found != is_negated).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_redis() {
        let is_match = |pattern: &str, text: &str| matches(pattern.as_bytes(), text.as_bytes());
        for (pattern, text) in [
            ("*", ""),
            ("a*", "abc"),
            ("*c", "abcc"),
            ("a?c", "abc"),
            ("[a-c]x", "bx"),
            ("[^a]x", "bx"),
            ("\\*", "*"),
            ("a*b*c", "aXbYbZc"),
            ("[c-a]", "b"),
            ("[\\]]", "]"),
            ("**a", "xa"),
            ("[a", "a"),
        ] {
            assert!(is_match(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [
            ("", "a"),
            ("a", ""),
            ("a?c", "ac"),
            ("[a-c]", "d"),
            ("[^a]", "a"),
            ("\\*", "a"),
            ("*a", "ab"),
            ("a*b", "ac"),
        ] {
            assert!(!is_match(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn stars_take_no_exponential_time() {
        let text = [b'a'; 1024];
        assert!(!matches(&[b"*a".repeat(30), b"b".to_vec()].concat(), &text));
    }
}
