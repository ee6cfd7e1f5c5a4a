//! Revision of the arithmetic on devices.

/// Revision of the arithmetic on devices. Raise it with each change of a kernel or of its compiler
/// options that alters the bits of keys, values or logits. Namespaces contain it.
pub(super) const KERNEL_REVISION: u32 = 1;

#[cfg(test)]
mod tests {
    use super::KERNEL_REVISION;
    use larder_kernels::cuda::{HEADERS, SOURCES, compile_options};
    use sha2::{Digest, Sha256};

    /// Digest of the sources and of the compiler options of [`KERNEL_REVISION`].
    const KERNEL_DIGEST: &str = "5af61ddbe65f4299";

    /// Files that compute no bit of keys, values or logits. New files count until they stand here.
    const WITHOUT_ARITHMETIC: [&str; 5] = ["crc32.cu", "crc32.cuh", "pages.cu", "quantise.cu", "sampling.cu"];

    /// The tokens of a source: without comments, and with one space for each run of white space.
    /// Sources have no string with a comment mark in it.
    fn code(text: &str) -> String {
        let mut code = String::new();
        let mut rest = text;
        while let Some(at) = rest.find("//").into_iter().chain(rest.find("/*")).min() {
            code.push_str(&rest[..at]);
            let end = if rest[at..].starts_with("//") { "\n" } else { "*/" };
            let after = rest[at..].find(end).map_or(rest.len(), |length| at + length + end.len());
            code.push('\n');
            rest = &rest[after..];
        }
        code.push_str(rest);
        code.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn digest<'a>(files: impl Iterator<Item = (&'a str, &'a str)>, options: &[String]) -> String {
        let mut files: Vec<(&str, &str)> = files.filter(|(name, _)| !WITHOUT_ARITHMETIC.contains(name)).collect();
        files.sort_unstable();
        let mut hash = Sha256::new();
        for (name, text) in files {
            hash.update(format!("{name}\n{}\n", code(text)));
        }
        hash.update(options.join(" "));
        let digest: [u8; 32] = hash.finalize().into();
        digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn all_files() -> impl Iterator<Item = (&'static str, &'static str)> {
        SOURCES.iter().map(|source| (source.file, source.content)).chain(HEADERS.iter().copied())
    }

    #[test]
    fn revision_stands_for_the_sources_of_the_kernels() {
        let found = digest(all_files(), &compile_options("sm_80"));
        assert_eq!(
            found, KERNEL_DIGEST,
            "the kernels differ from those of revision {KERNEL_REVISION}: raise KERNEL_REVISION if a bit of keys, \
             values or logits can differ, and set KERNEL_DIGEST to {found}"
        );
    }

    #[test]
    fn digest_sees_code_and_options_but_no_comments() {
        let of = |text: &str, option: &str| digest([("norm.cu", text)].into_iter(), &[option.to_string()]);
        let base = of("a = b + c; // sum\n", "-x");
        assert_eq!(of("/* the\nsum */ a = b +\n  c;\n// end", "-x"), base);
        assert_ne!(of("a = c + b;\n", "-x"), base);
        assert_ne!(of("a = b + c;\n", "-y"), base);
        for name in WITHOUT_ARITHMETIC {
            assert!(all_files().any(|(file, _)| file == name), "{name} is a source");
            assert_eq!(digest([(name, "a")].into_iter(), &[]), digest(std::iter::empty(), &[]));
        }
    }
}
