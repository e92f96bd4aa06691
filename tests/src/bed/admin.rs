//! The proxy's admin pages, asked from inside the node's network namespace.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};

use super::netns;

const TIMEOUT: Duration = Duration::from_secs(5);

/// An answer over HTTP.
#[derive(Debug, Clone)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// The body.
    pub body: String,
}

/// `GET path` from `server`, both seen from the network namespace at `netns`.
pub(crate) fn http_get(netns: &Path, server: SocketAddr, path: &str) -> anyhow::Result<Response> {
    netns::inside(netns, || {
        exchange(server, path).with_context(|| format!("GET http://{server}{path}"))
    })?
}

fn exchange(server: SocketAddr, path: &str) -> anyhow::Result<Response> {
    let mut stream = TcpStream::connect_timeout(&server, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    parse(&String::from_utf8_lossy(&answer))
}

fn parse(answer: &str) -> anyhow::Result<Response> {
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("an answer without an end of its head")?;
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|code| code.parse().ok())
        .context("an answer without a status")?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { unchunk(body)? } else { body.to_owned() };
    Ok(Response { status, body })
}

fn unchunk(mut text: &str) -> anyhow::Result<String> {
    let mut body = String::new();
    loop {
        let (size, rest) = text.split_once("\r\n").context("a chunk without a size")?;
        let size = usize::from_str_radix(size.trim(), 16).context("a chunk's size")?;
        if size == 0 {
            return Ok(body);
        }
        let Some(chunk) = rest.get(..size) else {
            bail!("a chunk shorter than its size")
        };
        body.push_str(chunk);
        text = rest[size..].trim_start_matches("\r\n");
    }
}

/// Metrics as the proxy exposed them at one moment.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    samples: Vec<Sample>,
}

#[derive(Debug, Clone)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Metrics {
    pub(super) fn parse(text: &str) -> Self {
        Self {
            samples: text.lines().filter_map(parse_sample).collect(),
        }
    }

    /// The sum of all samples of this name whose labels include these; 0 if there is none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.samples
            .iter()
            .filter(|sample| sample.name == name)
            .filter(|sample| {
                labels
                    .iter()
                    .all(|(key, value)| sample.labels.get(*key).is_some_and(|has| has == value))
            })
            .map(|sample| sample.value)
            .sum()
    }

    /// Whether there is a sample of this name.
    pub fn has(&self, name: &str) -> bool {
        self.samples.iter().any(|sample| sample.name == name)
    }
}

/// `name{label="value",…} 1.0`
fn parse_sample(line: &str) -> Option<Sample> {
    if line.starts_with('#') {
        return None;
    }
    let name_end = line.find(['{', ' '])?;
    let name = line[..name_end].to_owned();
    let mut rest = &line[name_end..];
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (key, after) = rest.split_once("=\"")?;
            let mut value = String::new();
            let mut characters = after.char_indices();
            let end = loop {
                match characters.next()? {
                    (at, '"') => break at + 1,
                    (_, '\\') => value.extend(characters.next().map(|(_, escaped)| escaped)),
                    (_, other) => value.push(other),
                }
            };
            labels.insert(key.trim_start_matches(',').to_owned(), value);
            rest = &after[end..];
        }
        rest = &rest[1..];
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name, labels, value })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_over_labels_not_asked_for() {
        let metrics = Metrics::parse(
            "# TYPE opened counter\nopened_total{reporter=\"source\",path=\"a,b}\"} 2\n\
             opened_total{reporter=\"source\",path=\"c\"} 3\nopened_total{reporter=\"destination\"} 7\nplain 1.5\n",
        );
        assert_eq!(metrics.sum("opened_total", &[("reporter", "source")]), 5.0);
        assert_eq!(metrics.sum("opened_total", &[("path", "a,b}")]), 2.0);
        assert_eq!(metrics.sum("plain", &[]), 1.5);
        assert!(!metrics.has("closed_total"));
    }

    #[test]
    fn a_chunked_answer_is_put_together() {
        let answer =
            "HTTP/1.1 503 Service Unavailable\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n";
        let response = parse(answer).unwrap();
        assert_eq!((response.status, response.body.as_str()), (503, "hello!"));
    }
}
