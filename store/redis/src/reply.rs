//! Replies in RESP2 and RESP3.

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protocol {
    #[default]
    Resp2,
    Resp3,
}

impl Protocol {
    pub fn number(self) -> i64 {
        match self {
            Protocol::Resp2 => 2,
            Protocol::Resp3 => 3,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// A short text without line ends.
    Simple(&'static str),
    /// Code and text of an error.
    Error(String),
    Integer(i64),
    Bulk(Vec<u8>),
    Null,
    Array(Vec<Reply>),
    /// RESP2 has no maps: names and values follow each other in an array.
    Map(Vec<(Reply, Reply)>),
}

impl Reply {
    pub const OK: Reply = Reply::Simple("OK");

    pub fn text(text: impl Into<String>) -> Reply {
        Reply::Bulk(text.into().into_bytes())
    }

    /// Appends the encoding.
    pub fn encode(&self, protocol: Protocol, into: &mut Vec<u8>) {
        match self {
            Reply::Simple(text) => line(into, b'+', text.as_bytes()),
            Reply::Error(text) => {
                into.push(b'-');
                // A line end would begin another reply. The text may quote a client.
                into.extend(text.bytes().map(|byte| if byte == b'\r' || byte == b'\n' { b' ' } else { byte }));
                into.extend_from_slice(b"\r\n");
            }
            Reply::Integer(number) => line(into, b':', number.to_string().as_bytes()),
            Reply::Bulk(bytes) => {
                bulk_header(bytes.len() as u64, into);
                into.extend_from_slice(bytes);
                into.extend_from_slice(b"\r\n");
            }
            Reply::Null => into.extend_from_slice(match protocol {
                Protocol::Resp2 => b"$-1\r\n",
                Protocol::Resp3 => b"_\r\n",
            }),
            Reply::Array(items) => {
                array_header(items.len(), into);
                items.iter().for_each(|item| item.encode(protocol, into));
            }
            Reply::Map(pairs) => {
                match protocol {
                    Protocol::Resp2 => array_header(2 * pairs.len(), into),
                    Protocol::Resp3 => line(into, b'%', pairs.len().to_string().as_bytes()),
                }
                for (name, value) in pairs {
                    name.encode(protocol, into);
                    value.encode(protocol, into);
                }
            }
        }
    }
}

/// Appends the header of a string of so many bytes. The bytes and a line end must follow.
pub fn bulk_header(bytes: u64, into: &mut Vec<u8>) {
    line(into, b'$', bytes.to_string().as_bytes());
}

/// Appends the header of an array. So many replies must follow.
pub fn array_header(items: usize, into: &mut Vec<u8>) {
    line(into, b'*', items.to_string().as_bytes());
}

fn line(into: &mut Vec<u8>, kind: u8, text: &[u8]) {
    into.push(kind);
    into.extend_from_slice(text);
    into.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_encoded_for_both_protocols() {
        let reply = Reply::Map(vec![
            (Reply::text("a"), Reply::Null),
            (Reply::text("b"), Reply::Array(vec![Reply::Integer(-7), Reply::OK])),
            (Reply::text("c"), Reply::Error("ERR two\r\nlines".into())),
        ]);
        let encoded = |protocol| {
            let mut bytes = Vec::new();
            reply.encode(protocol, &mut bytes);
            String::from_utf8(bytes).unwrap()
        };
        let tail = "$1\r\nb\r\n*2\r\n:-7\r\n+OK\r\n$1\r\nc\r\n-ERR two  lines\r\n";
        assert_eq!(encoded(Protocol::Resp2), format!("*6\r\n$1\r\na\r\n$-1\r\n{tail}"));
        assert_eq!(encoded(Protocol::Resp3), format!("%3\r\n$1\r\na\r\n_\r\n{tail}"));
    }
}
