//! From samples to the table and the JSON file.

use std::path::Path;

use anyhow::Context;
use serde::Serialize;

/// The medians of one row, as they are written to the JSON file.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) unit: &'static str,
    pub(super) plain: Option<f64>,
    pub(super) adit: Option<f64>,
    /// Adit's figure over plain TCP's.
    pub(super) ratio: Option<f64>,
    #[serde(skip)]
    spread: [String; 2],
}

impl Row {
    /// A row from the samples of each side; a side that has none has no figure.
    pub(super) fn new(name: &'static str, unit: &'static str, plain: &[f64], adit: &[f64]) -> Self {
        let (plain_median, adit_median) = (median(plain), median(adit));
        let ratio = match (plain_median, adit_median) {
            (Some(plain), Some(adit)) if plain > 0.0 => Some(adit / plain),
            _ => None,
        };
        Self {
            name,
            unit,
            plain: plain_median.map(rounded),
            adit: adit_median.map(rounded),
            ratio: ratio.map(rounded),
            spread: [spread(plain), spread(adit)],
        }
    }

    /// A row that has a figure for Adit only.
    pub(super) fn of_adit(name: &'static str, unit: &'static str, adit: &[f64]) -> Self {
        Self::new(name, unit, &[], adit)
    }

    pub(super) fn is_measured(&self) -> bool {
        self.adit.is_some()
    }

    pub(super) fn line(&self) -> String {
        let figure = |value: Option<f64>| value.map_or("-".to_owned(), number);
        let [plain_spread, adit_spread] = &self.spread;
        format!(
            "{:<28}{:>7}  {:>8}  {:<15}{:>8}  {:<15}{:>6}",
            self.name,
            self.unit,
            figure(self.plain),
            plain_spread,
            figure(self.adit),
            adit_spread,
            self.ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"))
        )
    }
}

/// The first line of the table.
pub(super) fn head() -> String {
    format!(
        "{:<28}{:>7}  {:>8}  {:<15}{:>8}  {:<15}{:>6}",
        "row", "unit", "plain", "min..max", "adit", "min..max", "ratio"
    )
}

/// Writes `{"rows":[…]}`.
pub(super) fn write_json(path: &Path, rows: &[Row]) -> anyhow::Result<()> {
    #[derive(Serialize)]
    struct Report<'a> {
        rows: &'a [Row],
    }
    let text = serde_json::to_string_pretty(&Report { rows })?;
    std::fs::write(path, text + "\n").with_context(|| format!("write {}", path.display()))
}

pub(super) fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

fn spread(samples: &[f64]) -> String {
    if samples.len() < 2 {
        return String::new();
    }
    let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
    let most = samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{}..{}", number(least), number(most))
}

/// A figure for the eye: three digits that matter, or all of an integer part.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// To four digits that matter: more are noise.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_medians_and_their_ratio() {
        let row = Row::new("bulk", "Gbit/s", &[40.0, 10.0, 20.0], &[8.0, 12.0]);
        assert_eq!((row.plain, row.adit, row.ratio), (Some(20.0), Some(10.0), Some(0.5)));
        assert_eq!(row.spread, ["10.0..40.0", "8.00..12.0"]);
    }

    #[test]
    fn a_side_without_samples_is_null_and_has_no_ratio() {
        let row = Row::of_adit("rss", "KiB", &[16_384.567]);
        let json = serde_json::to_value(&row).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"name": "rss", "unit": "KiB", "plain": null, "adit": 16380.0, "ratio": null})
        );
        assert!(!Row::new("bulk", "Gbit/s", &[1.0], &[]).is_measured());
    }
}
