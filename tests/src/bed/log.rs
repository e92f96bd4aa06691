//! What processes of the bed write: their log files, and the access log in them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;

const TAIL_LINES: usize = 60;

/// A process' standard output and error, together in one file.
#[derive(Debug, Clone)]
pub struct Log {
    name: String,
    path: PathBuf,
}

impl Log {
    pub(super) fn new(name: &str, folder: &Path) -> Self {
        Self {
            name: name.to_owned(),
            path: folder.join(format!("{name}.log")),
        }
    }

    /// Sends the output of `command` to the end of the file.
    pub(super) fn take_output_of(&self, command: &mut Command) -> anyhow::Result<()> {
        let file = File::options()
            .append(true)
            .create(true)
            .open(&self.path)
            .with_context(|| format!("open log file {}", self.path.display()))?;
        command
            .stdout(file.try_clone().context("share the log file")?)
            .stderr(file);
        Ok(())
    }

    /// The name of the process.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All that was written so far, without colours.
    pub fn text(&self) -> String {
        let bytes = fs::read(&self.path).unwrap_or_default();
        without_escapes(&String::from_utf8_lossy(&bytes))
    }

    /// The last lines.
    pub fn tail(&self) -> String {
        let text = self.text();
        let lines: Vec<&str> = text.lines().collect();
        let from = lines.len().saturating_sub(TAIL_LINES);
        lines[from..].iter().map(|line| format!("  {line}\n")).collect()
    }

    /// Waits for a line that contains `pattern` and gives the first such line.
    pub fn wait_for(&self, pattern: &str, deadline: Duration) -> anyhow::Result<String> {
        let mut found = None;
        super::wait_for(
            &format!("a line with {pattern:?} in the log of {}", self.name),
            deadline,
            || {
                found = self
                    .text()
                    .lines()
                    .find(|line| line.contains(pattern))
                    .map(str::to_owned);
                Ok(found.is_some())
            },
        )?;
        found.context("the line that was just found")
    }

    /// The access log: the lines that report a connection's end.
    pub fn access(&self) -> Vec<AccessLine> {
        self.lines_of(" access ")
    }

    /// The lines that report what a policy in dry-run mode would have refused.
    pub fn dry_run(&self) -> Vec<AccessLine> {
        self.lines_of(" dry-run ")
    }

    fn lines_of(&self, event: &str) -> Vec<AccessLine> {
        self.text()
            .lines()
            .filter(|line| line.contains(event))
            .filter_map(AccessLine::parse)
            .collect()
    }

    /// Prints the last lines for the one who reads why a test failed.
    pub(super) fn print_tail(&self) {
        eprintln!("---- log of {} ({})\n{}", self.name, self.path.display(), self.tail());
    }
}

/// One connection's line in the access log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessLine {
    fields: BTreeMap<String, String>,
}

impl AccessLine {
    /// Reads a line of key=value pairs; `None` if it does not tell of a connection.
    pub fn parse(line: &str) -> Option<Self> {
        let at = line.find("reporter=")?;
        let mut fields = BTreeMap::new();
        let mut rest = &line[at..];
        while let Some((key, after)) = rest.split_once('=') {
            let (value, tail) = take_value(after);
            fields.insert(key.trim().to_owned(), value);
            rest = tail;
        }
        Some(Self { fields })
    }

    /// A field's value; empty if the line lacks it.
    pub fn get(&self, key: &str) -> &str {
        self.fields.get(key).map_or("", String::as_str)
    }

    /// A field's value as a number; 0 if the line lacks it.
    pub fn number(&self, key: &str) -> u64 {
        self.get(key).parse().unwrap_or(0)
    }

    /// Whether all these fields have these values.
    pub fn has(&self, wanted: &[(&str, &str)]) -> bool {
        wanted.iter().all(|(key, value)| self.get(key) == *value)
    }
}

/// Splits off a bare or quoted value.
fn take_value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let (value, rest) = text.split_once(' ').unwrap_or((text, ""));
        return (value.to_owned(), rest);
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            other => value.push(other),
        }
    }
    (value, "")
}

fn without_escapes(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character == '\u{1b}' {
            // A colour: ESC [ … m
            characters.by_ref().find(|end| end.is_ascii_alphabetic());
        } else {
            plain.push(character);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_line_is_read_by_its_keys() {
        let line = r#"2026-11-29T20:00:00Z INFO access reporter=source path=hbone source.addr=10.244.1.2:4711 bytes_sent=5 detail="deny: a/b rule 1, \"quoted\"" how=policy"#;
        let line = AccessLine::parse(line).unwrap();
        assert!(line.has(&[("reporter", "source"), ("path", "hbone"), ("how", "policy")]));
        assert_eq!(line.number("bytes_sent"), 5);
        assert_eq!(line.get("detail"), r#"deny: a/b rule 1, "quoted""#);
        assert_eq!(line.get("service"), "");
    }

    #[test]
    fn other_lines_are_not_access_lines() {
        assert_eq!(AccessLine::parse("INFO the proxy is ready pods=3"), None);
    }

    #[test]
    fn colours_are_dropped() {
        assert_eq!(without_escapes("\u{1b}[32mINFO\u{1b}[0m ready"), "INFO ready");
    }
}
