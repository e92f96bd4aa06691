//! What a check has found, and how it is shown.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::json;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// As it should be.
    Ok,
    /// Adit works, or may, and somebody should know.
    Warning,
    /// Adit does not work so.
    Failed,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "FAILED",
        }
    }
}

/// What one check has found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// What was looked at.
    pub(super) name: String,
    /// How bad it is.
    pub(super) level: Level,
    /// What was seen.
    pub(super) what: String,
    /// What to do about it; none where all is well.
    pub(super) advice: Option<String>,
}

impl Finding {
    pub(super) fn ok(name: impl Into<String>, what: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            level: Level::Ok,
            what: what.into(),
            advice: None,
        }
    }

    pub(super) fn warning(name: impl Into<String>, what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::bad(Level::Warning, name, what, advice)
    }

    pub(super) fn failed(name: impl Into<String>, what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::bad(Level::Failed, name, what, advice)
    }

    pub(super) fn bad(
        level: Level,
        name: impl Into<String>,
        what: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self {
            name: name.into(),
            level,
            what: what.into(),
            advice: Some(advice.into()),
        }
    }
}

/// The worst of them.
pub(super) fn worst(findings: &[Finding]) -> Level {
    let levels = findings.iter().map(|finding| finding.level);
    levels.max().unwrap_or(Level::Ok)
}

/// A line for each, and one of what to do below each that is not as it should be.
pub(super) fn as_text(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.name.chars().count()).max();
    let width = width.unwrap_or_default();
    let mut text = String::new();
    for finding in findings {
        let level = finding.level.word();
        let _ = writeln!(
            text,
            "{level:<7}  {:<width$}  {}",
            finding.name,
            on_one_line(&finding.what)
        );
        if let Some(advice) = &finding.advice {
            let _ = writeln!(text, "{:<7}  {:<width$}  -> {}", "", "", on_one_line(advice));
        }
    }
    text
}

/// Other programs' words may have any characters in them.
fn on_one_line(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// All of them as JSON.
pub(super) fn as_json(findings: &[Finding]) -> String {
    format!("{:#}\n", json!({ "result": worst(findings), "findings": findings }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three() -> Vec<Finding> {
        vec![
            Finding::ok("kernel", "Linux 6.8"),
            Finding::warning("pod shop/a", "not\nyet", "wait"),
            Finding::failed("bpffs", "none", "mount one"),
        ]
    }

    #[test]
    fn findings_are_aligned_lines_with_advice_below() {
        let expected = "ok       kernel      Linux 6.8\n\
                        warning  pod shop/a  not yet\n                     -> wait\n\
                        FAILED   bpffs       none\n                     -> mount one\n";
        assert_eq!(as_text(&three()), expected);
        assert_eq!(as_text(&[]), "");
    }

    #[test]
    fn the_worst_finding_is_the_result() {
        let all = three();
        for (count, level) in [(0, Level::Ok), (1, Level::Ok), (2, Level::Warning), (3, Level::Failed)] {
            assert_eq!(worst(&all[..count]), level);
        }
        let value: serde_json::Value = serde_json::from_str(&as_json(&all)).unwrap();
        assert_eq!(value["result"], "failed");
        assert_eq!(value["findings"][1]["level"], "warning");
        assert_eq!(value["findings"][0]["advice"], serde_json::Value::Null);
    }
}
