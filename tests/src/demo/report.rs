//! What the demo prints, and its checks.

use std::io::IsTerminal;
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use serde::Serialize;

/// Collects the checks while it prints.
pub(super) struct Report {
    begin: Instant,
    colours: bool,
    headings: usize,
    checks: Vec<Check>,
}

/// Something that was promised, and whether it held.
#[derive(Debug, Serialize)]
struct Check {
    name: String,
    ok: bool,
    detail: String,
}

const BOLD: &str = "1";
const GREEN: &str = "32";
const RED: &str = "1;31";

impl Report {
    pub(super) fn new() -> Self {
        let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self {
            begin: Instant::now(),
            colours,
            headings: 0,
            checks: Vec::new(),
        }
    }

    /// Begins a step.
    pub(super) fn heading(&mut self, title: &str) {
        self.headings += 1;
        println!("\n{}", self.painted(BOLD, &format!("{}. {title}", self.headings)));
    }

    /// Tells something.
    pub(super) fn say(&self, text: impl AsRef<str>) {
        for line in text.as_ref().lines() {
            println!("   {line}");
        }
    }

    /// Tells something word by word, such as a line of a log.
    pub(super) fn quote(&self, text: impl AsRef<str>) {
        for line in text.as_ref().lines() {
            println!("     | {line}");
        }
    }

    /// Takes down whether something held.
    pub(super) fn check(&mut self, name: &str, ok: bool, detail: impl Into<String>) {
        let detail = detail.into();
        let word = if ok {
            self.painted(GREEN, "ok    ")
        } else {
            self.painted(RED, "FAILED")
        };
        println!("   {word} {name}: {detail}");
        self.checks.push(Check {
            name: name.to_owned(),
            ok,
            detail,
        });
    }

    /// Whether there are checks and all hold.
    pub(super) fn all_hold(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(|check| check.ok)
    }

    /// Prints how many checks hold and which do not.
    pub(super) fn summary(&self) {
        let good = self.checks.iter().filter(|check| check.ok).count();
        let colour = if self.all_hold() { GREEN } else { RED };
        println!();
        for failed in self.checks.iter().filter(|check| !check.ok) {
            println!("{} {}: {}", self.painted(RED, "FAILED"), failed.name, failed.detail);
        }
        let count = self.painted(colour, &format!("{good} of {} checks hold", self.checks.len()));
        println!("{count}, {:.1} s", self.begin.elapsed().as_secs_f64());
    }

    /// Writes `{"checks":[…]}`.
    pub(super) fn write_json(&self, path: &Path) -> anyhow::Result<()> {
        #[derive(Serialize)]
        struct File<'a> {
            checks: &'a [Check],
        }
        let text = serde_json::to_string_pretty(&File { checks: &self.checks })?;
        std::fs::write(path, text + "\n").with_context(|| format!("write {}", path.display()))
    }

    fn painted(&self, colour: &str, text: &str) -> String {
        if self.colours {
            format!("\x1b[{colour}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_holds_if_it_has_checks_and_none_failed() {
        let mut report = Report::new();
        assert!(!report.all_hold(), "nothing was shown");
        report.check("first", true, "fine");
        assert!(report.all_hold());
        report.check("second", false, "not fine");
        assert!(!report.all_hold());
    }

    #[test]
    fn checks_are_written_with_name_outcome_and_detail() {
        let mut report = Report::new();
        report.check("first", true, "fine");
        let file = tempfile::NamedTempFile::new().unwrap();
        report.write_json(file.path()).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(file.path()).unwrap()).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"checks": [{"name": "first", "ok": true, "detail": "fine"}]})
        );
    }
}
