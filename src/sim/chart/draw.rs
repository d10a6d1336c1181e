//! Draws curves as one SVG picture: panels one below another, each with its legend at its side.
//!
//! The simulator passes finished numbers, for example GPU allocation and fragmentation against
//! arrived load, one curve per policy. Labels are free text: they are shortened to their room,
//! control characters are dropped and the SVG backend escapes the rest. Colors are those of Okabe
//! and Ito, which color-blind readers can distinguish, without yellow, which is hard to read on
//! white. After seven curves the colors come again as dashed lines.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::chart::chart_layout::{axis, decimals, shorten};
use crate::snapshot::replace::replace;

/// Drawing units of one pixel; all lengths below are in units. The SVG backend has only whole
/// units, and lines that bend only at whole pixels look jagged.
const PX: u32 = 4;
/// Width of the picture.
const WIDTH: u32 = 980 * PX;
/// Width of the column at the right, with the legend.
const LEGEND_WIDTH: u32 = 220 * PX;
/// Height of a panel whose legend does not need more.
const PANEL_HEIGHT: u32 = 380 * PX;
/// Free space around each plot.
const MARGIN: u32 = 14 * PX;
/// Room for the marks and the name of the y axis.
const Y_AXIS_WIDTH: u32 = 66 * PX;
/// Room for the names of rows and the name of their axis.
const ROW_NAME_WIDTH: u32 = 190 * PX;
/// Height of a row with a name.
const ROW_HEIGHT: u32 = 22 * PX;
/// Radius of a dot.
const DOT: u32 = 4 * PX;
/// Room for the marks and the name of the x axis.
const X_AXIS_HEIGHT: u32 = 52 * PX;
/// Height of the middle of a panel's title, from the top of the panel.
const TITLE_Y: i32 = 20 * PX.cast_signed();
/// Top of a panel's plot.
const PLOT_TOP: u32 = 42 * PX;
/// Height of a line of the legend.
const LEGEND_LINE: i32 = 24 * PX.cast_signed();
/// Length of the line drawn before a label in the legend.
const LEGEND_SAMPLE: i32 = 28 * PX.cast_signed();
/// Between that line and the label, and after the label.
const LEGEND_GAP: i32 = 10 * PX.cast_signed();
/// Length of a dash and of the gap after it.
const DASH: (i32, i32) = (7 * PX.cast_signed(), 4 * PX.cast_signed());
/// Top of the legend, level with the frame of the plot.
const LEGEND_TOP: i32 = 56 * PX.cast_signed();
/// Largest value that is drawn.
const VALUE_MAX: f64 = 1e12;
/// Plotters draws text smaller than the size it is given, by this factor.
const FONT_SCALE: f64 = 1.24;
/// Size of the panel titles.
const TITLE_SIZE: f64 = 17.0 * PX as f64;
/// Size of all other text.
const TEXT_SIZE: f64 = 13.0 * PX as f64;
const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const GRID: RGBColor = RGBColor(0xE2, 0xE2, 0xE2);
const FRAME: RGBColor = RGBColor(0x88, 0x88, 0x88);
const COLOURS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xB2),
    RGBColor(0xD5, 0x5E, 0x00),
    RGBColor(0x00, 0x9E, 0x73),
    RGBColor(0xCC, 0x79, 0xA7),
    RGBColor(0xE6, 0x9F, 0x00),
    RGBColor(0x56, 0xB4, 0xE9),
    RGBColor(0x00, 0x00, 0x00),
];

/// One line of a panel.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Its name in the legend.
    pub label: String,
    /// The points in drawing order, as (x, y).
    pub points: Vec<(f64, f64)>,
}

/// One panel.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    pub title: String,
    /// What the x axis shows, with its unit.
    pub x_label: String,
    /// What the y axis shows, with its unit.
    pub y_label: String,
    /// Names of the whole numbers of y, the first one on top. With them points are dots without a line.
    pub rows: Vec<String>,
    /// The lines. The position is the color: give a policy the same one in every panel.
    pub curves: Vec<Curve>,
}

/// Why no picture was made.
#[derive(Debug, thiserror::Error)]
pub enum ChartError {
    /// There is no panel to draw.
    #[error("there is no chart to draw")]
    NoCharts,
    /// A panel has no points at all, so its axes have no range.
    #[error("the chart `{title}` has no points")]
    NoPoints { title: String },
    /// A coordinate is infinite, not a number, or absurdly large.
    #[error("the curve `{label}` has the point `({x}, {y})`, which cannot be drawn")]
    BadPoint { label: String, x: f64, y: f64 },
    /// The path does not name a file.
    #[error("`{path}` is not the name of a file")]
    NotAFile { path: PathBuf },
    /// The file could not be written; the old one is unchanged.
    #[error("cannot write `{path}`")]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot draw the chart")]
    Draw(#[source] Box<dyn Error + Send + Sync>),
}

/// Draws `charts` one below another into the file at `path`.
///
/// The picture is written beside the file first and then replaces it, so a reader never sees half
/// of it.
///
/// # Errors
/// Any [`ChartError`].
pub fn write_svg(path: &Path, charts: &[Chart]) -> Result<(), ChartError> {
    let picture = draw_svg(charts)?;
    if path.file_name().is_none() {
        return Err(ChartError::NotAFile { path: path.to_owned() });
    }
    replace(&[(path, picture.as_bytes())])
        .map_err(|error| ChartError::Write { path: error.path, source: error.source })
}

/// Draws `charts` one below another and returns the SVG text.
///
/// # Errors
/// Any [`ChartError`] except those about files.
pub fn draw_svg(charts: &[Chart]) -> Result<String, ChartError> {
    if charts.is_empty() {
        return Err(ChartError::NoCharts);
    }
    charts.iter().try_for_each(check)?;
    let heights: Vec<u32> = charts.iter().map(panel_height).collect();
    let mut picture = String::new();
    paint(&mut picture, charts, &heights).map_err(|error| ChartError::Draw(Box::new(error)))?;
    // The backend makes a unit a pixel; the view box still counts in units.
    let height = heights.iter().sum::<u32>();
    let drawn = format!("<svg width=\"{WIDTH}\" height=\"{height}\"");
    let shown = format!("<svg width=\"{}\" height=\"{}\"", WIDTH / PX, height / PX);
    Ok(picture.replacen(&drawn, &shown, 1))
}

fn check(chart: &Chart) -> Result<(), ChartError> {
    if chart.curves.iter().all(|curve| curve.points.is_empty()) {
        return Err(ChartError::NoPoints { title: chart.title.clone() });
    }
    for curve in &chart.curves {
        for &(x, y) in &curve.points {
            // A comparison with NaN is false as well.
            if !(x.abs() <= VALUE_MAX && y.abs() <= VALUE_MAX) {
                return Err(ChartError::BadPoint { label: curve.label.clone(), x, y });
            }
        }
    }
    Ok(())
}

fn panel_height(chart: &Chart) -> u32 {
    let lines = u32::try_from(chart.curves.len()).unwrap_or(u32::MAX).min(1000);
    let legend = (lines + 1) * LEGEND_LINE.unsigned_abs() + LEGEND_TOP.unsigned_abs();
    let rows = u32::try_from(chart.rows.len()).unwrap_or(u32::MAX).min(1000) * ROW_HEIGHT;
    legend.max(PANEL_HEIGHT).max(rows + PLOT_TOP + X_AXIS_HEIGHT + MARGIN)
}

type Painted<'p> = Result<(), DrawingAreaErrorKind<<SVGBackend<'p> as DrawingBackend>::ErrorType>>;
type Area<'p> = DrawingArea<SVGBackend<'p>, Shift>;

fn paint<'p>(picture: &'p mut String, charts: &[Chart], heights: &[u32]) -> Painted<'p> {
    let all = SVGBackend::with_string(picture, (WIDTH, heights.iter().sum())).into_drawing_area();
    all.fill(&WHITE)?;
    let mut rest = all.clone();
    for (chart, height) in charts.iter().zip(heights) {
        let (panel, below) = rest.split_vertically(*height);
        let (plot, legend) = panel.split_horizontally(WIDTH - LEGEND_WIDTH);
        paint_plot(&plot, chart)?;
        paint_legend(&legend, chart)?;
        rest = below;
    }
    all.present()
}

fn paint_plot<'p>(area: &Area<'p>, chart: &Chart) -> Painted<'p> {
    let points = || chart.curves.iter().flat_map(|curve| curve.points.iter().copied());
    let x_range = axis(points().map(|(x, _)| x), 13.0);
    let rows = chart.rows.len();
    let (y_range, y_axis_width) = match rows {
        0 => (axis(points().map(|(_, y)| y), 8.0), Y_AXIS_WIDTH),
        _ => (rows as f64 - 0.5..-0.5, ROW_NAME_WIDTH),
    };
    let (x_digits, y_digits) = (decimals(&x_range), decimals(&y_range));
    let plot_width = f64::from(WIDTH - LEGEND_WIDTH);
    let px = f64::from(PX);
    let title = shorten(&chart.title, plot_width - 120.0 * px, TITLE_SIZE);
    let middle = (MARGIN + y_axis_width + WIDTH - LEGEND_WIDTH - MARGIN) / 2;
    let above = font(TITLE_SIZE).pos(Pos::new(HPos::Center, VPos::Center));
    area.draw_text(&title, &above, (middle.cast_signed(), TITLE_Y))?;
    let mut plot = ChartBuilder::on(area)
        .margin(MARGIN)
        .margin_top(PLOT_TOP)
        .x_label_area_size(X_AXIS_HEIGHT)
        .y_label_area_size(y_axis_width)
        .build_cartesian_2d(x_range, y_range)?;
    plot.configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID.stroke_width(PX))
        .axis_style(FRAME.stroke_width(PX))
        .set_all_tick_mark_size(5 * PX)
        .label_style(font(TEXT_SIZE))
        .axis_desc_style(font(TEXT_SIZE))
        .x_labels(14)
        .y_labels(if rows == 0 { 9 } else { 2 * rows })
        .x_label_formatter(&|x| format!("{x:.x_digits$}"))
        .y_label_formatter(&|y| match rows {
            0 => format!("{y:.y_digits$}"),
            _ => row_name(chart, *y),
        })
        .x_desc(shorten(&chart.x_label, plot_width - 160.0 * px, TEXT_SIZE))
        .y_desc(shorten(&chart.y_label, f64::from(PANEL_HEIGHT) - 120.0 * px, TEXT_SIZE))
        .draw()?;
    for (place, curve) in chart.curves.iter().enumerate() {
        let points = curve.points.iter().copied();
        if rows > 0 {
            let style = COLOURS[place % COLOURS.len()].filled();
            plot.draw_series(points.map(|point| Circle::new(point, DOT, style)))?;
        } else if is_dashed(place) {
            plot.draw_series(DashedLineSeries::new(points, DASH.0, DASH.1, line(place)))?;
        } else {
            plot.draw_series(LineSeries::new(points, line(place)))?;
        }
    }
    Ok(())
}

fn paint_legend<'p>(area: &Area<'p>, chart: &Chart) -> Painted<'p> {
    let text = font(TEXT_SIZE).pos(Pos::new(HPos::Left, VPos::Center));
    let start = LEGEND_SAMPLE + LEGEND_GAP;
    let room = f64::from(LEGEND_WIDTH) - f64::from(start + LEGEND_GAP);
    let mut y = LEGEND_TOP;
    for (place, curve) in chart.curves.iter().enumerate() {
        let (dash, gap) = if is_dashed(place) { DASH } else { (LEGEND_SAMPLE, 0) };
        let mut x = 0;
        while x < LEGEND_SAMPLE {
            area.draw(&PathElement::new([(x, y), (x + dash, y)], line(place)))?;
            x += dash + gap;
        }
        area.draw_text(&shorten(&curve.label, room, TEXT_SIZE), &text, (start, y))?;
        y += LEGEND_LINE;
    }
    Ok(())
}

/// The name of the row at `y`, where one is.
fn row_name(chart: &Chart, y: f64) -> String {
    let named = chart.rows.iter().zip(0_u32..).find(|(_, row)| (f64::from(*row) - y).abs() < 1e-6);
    let room = f64::from(ROW_NAME_WIDTH - 40 * PX);
    named.map(|(name, _)| shorten(name, room, TEXT_SIZE)).unwrap_or_default()
}

fn font(size: f64) -> TextStyle<'static> {
    ("sans-serif", size * FONT_SCALE, &INK).into_text_style(&(WIDTH, PANEL_HEIGHT))
}

fn line(place: usize) -> ShapeStyle {
    COLOURS[place % COLOURS.len()].stroke_width(2 * PX)
}

fn is_dashed(place: usize) -> bool {
    place / COLOURS.len() % 2 == 1
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::slice::from_ref;

    use super::*;
    use crate::chart::chart_layout::is_printable;

    fn curve(label: &str, points: &[(f64, f64)]) -> Curve {
        Curve { label: label.to_owned(), points: points.to_vec() }
    }

    fn chart(curves: Vec<Curve>) -> Chart {
        let [title, x_label, y_label] =
            ["GPU allocation", "arrived load (% of the cluster's GPUs)", "allocated GPUs (%)"]
                .map(str::to_owned);
        Chart { title, x_label, y_label, rows: Vec::new(), curves }
    }

    #[test]
    fn every_panel_shows_its_title_axes_labels_and_lines() {
        let panel = chart(vec![curve("fgd", &[(0.0, 0.0), (130.0, 95.4)])]);
        let picture = draw_svg(&[panel.clone(), panel]).unwrap();
        for text in
            ["GPU allocation", "arrived load (% of the cluster", "allocated GPUs (%)", "fgd"]
        {
            assert_eq!(picture.matches(text).count(), 2, "{text}");
        }
        assert_eq!(picture.matches(r##"stroke="#0072B2""##).count(), 4, "two curves, two samples");
        let size = r#"<svg width="980" height="760" viewBox="0 0 3920 3040""#;
        assert!(picture.starts_with(size), "{picture:.200}");
    }

    #[test]
    fn rows_have_names_and_dots() {
        let rows = ["pools 0.85", "<lifesize>"].map(str::to_owned).to_vec();
        let panel = Chart { rows, ..chart(vec![curve("fgd", &[(0.4, 0.0), (3.0, 1.0)])]) };
        let picture = draw_svg(&[panel]).unwrap();
        for (text, times) in [("pools 0.85", 1), ("&lt;lifesize&gt;", 1), ("<circle", 2)] {
            assert_eq!(picture.matches(text).count(), times, "{text}: {picture}");
        }
    }

    #[test]
    fn labels_are_escaped_in_the_picture() {
        let label = "</text><script>\u{0}\u{1b}[31m\u{202e}&\u{ffff}";
        let picture = draw_svg(&[chart(vec![curve(label, &[(0.0, 1.0)])])]).unwrap();
        assert!(picture.contains("&lt;/text&gt;&lt;script&gt;"), "{picture}");
        let untracked = |c: char| c != '\n' && !is_printable(c);
        assert!(!picture.contains("<script") && !picture.contains(untracked));
    }

    #[test]
    fn an_undrawable_chart_is_rejected() {
        let cases = [
            (vec![], "there is no chart to draw"),
            (vec![chart(vec![])], "the chart `GPU allocation` has no points"),
            (vec![chart(vec![curve("fgd", &[])])], "the chart `GPU allocation` has no points"),
            (
                vec![chart(vec![curve("fgd", &[(0.0, f64::NAN)])])],
                "the curve `fgd` has the point `(0, NaN)`, which cannot be drawn",
            ),
            (
                vec![chart(vec![curve("fgd", &[(1e13, 0.0)])])],
                "the curve `fgd` has the point `(10000000000000, 0)`, which cannot be drawn",
            ),
        ];
        for (charts, expected) in cases {
            assert_eq!(draw_svg(&charts).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn a_file_is_replaced_atomically_and_leaves_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.svg");
        fs::write(&path, "old").unwrap();
        let panel = chart(vec![curve("fgd", &[(0.0, 1.0), (1.0, 2.0)])]);
        write_svg(&path, from_ref(&panel)).unwrap();
        assert!(fs::read_to_string(&path).unwrap().ends_with("</svg>\n"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

        fs::create_dir(folder.path().join("taken.svg")).unwrap();
        for bad in ["absent/out.svg", "taken.svg", "taken.svg/.."] {
            let refused = write_svg(&folder.path().join(bad), from_ref(&panel));
            assert!(matches!(refused, Err(ChartError::Write { .. } | ChartError::NotAFile { .. })));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
