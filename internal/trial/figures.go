package trial

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"
)

// Figure is one measured thing: a value for each repetition, of which the median counts and the rest shows how far to trust it.
type Figure struct {
	Name   string    // as in the JSON, with its unit at the end where it has one
	Says   string    // in words
	Values []float64 // in the order of the repetitions
	// Aim is what the median should reach: at least or at most AimValue. Empty: the figure is for information.
	Aim      string
	AimValue float64
}

// The kinds of aims.
const (
	AtLeast = "at least"
	AtMost  = "at most"
)

// Median is the middle of the values, or the mean of the two in the middle; NaN without values.
func (f Figure) Median() float64 {
	if len(f.Values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(f.Values))
	half := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[half]
	}
	return (sorted[half-1] + sorted[half]) / 2
}

// Reached reports whether the median reaches the aim; true where there is none.
func (f Figure) Reached() bool {
	switch f.Aim {
	case AtLeast:
		return f.Median() >= f.AimValue
	case AtMost:
		return f.Median() <= f.AimValue
	}
	return true
}

// BenchReport is the result of one bench. [BenchReport.Print] makes a table of it; its JSON is one object, in which every figure's median
// stands under its own name, and all about it in "figures".
type BenchReport struct {
	Bench     string
	StartedAt time.Time
	Took      float64 // seconds
	Repeat    int
	Orders    int
	Figures   []Figure
	Settings  []Setting // of machine, servers and product, as far as they decide the figures
}

// Setting is one line of what a figure depends on.
type Setting struct{ Name, Value string }

// add appends a value to a figure, which is made for the first one.
func (r *BenchReport) add(name, says string, value float64) *Figure {
	for i := range r.Figures {
		if r.Figures[i].Name == name {
			r.Figures[i].Values = append(r.Figures[i].Values, value)
			return &r.Figures[i]
		}
	}
	r.Figures = append(r.Figures, Figure{Name: name, Says: says, Values: []float64{value}})
	return &r.Figures[len(r.Figures)-1]
}

// aim says what a figure should reach.
func (f *Figure) aim(kind string, value float64) { f.Aim, f.AimValue = kind, value }

// MarshalJSON implements json.Marshaler.
func (r BenchReport) MarshalJSON() ([]byte, error) {
	type spread struct {
		Says    string    `json:"says"`
		Median  float64   `json:"median"`
		Min     float64   `json:"min"`
		Max     float64   `json:"max"`
		Values  []float64 `json:"values"`
		Aim     string    `json:"aim,omitempty"`
		Reached *bool     `json:"reached,omitempty"`
	}
	settings, figures := map[string]string{}, map[string]spread{}
	object := map[string]any{
		"bench": r.Bench, "started_at": r.StartedAt, "took_seconds": r.Took, "repeat": r.Repeat, "orders": r.Orders, "settings": settings, "figures": figures,
	}
	for _, s := range r.Settings {
		settings[s.Name] = s.Value
	}
	for _, f := range r.Figures {
		s := spread{Says: f.Says, Median: f.Median(), Min: slices.Min(f.Values), Max: slices.Max(f.Values), Values: f.Values}
		if f.Aim != "" {
			reached := f.Reached()
			s.Aim, s.Reached = f.Aim+" "+plain3(f.AimValue), &reached
		}
		figures[f.Name], object[f.Name] = s, s.Median
	}
	return json.Marshal(object)
}

// Print writes the report for a person.
func (r BenchReport) Print(w io.Writer, s Style) error {
	s.Width = min(max(s.Width, 60), 132)
	var b strings.Builder
	const name = 34
	fmt.Fprintln(&b, s.paint(bold, fmt.Sprintf("%-*s %10s %10s %10s", name, "bench "+r.Bench, "median", "min", "max")))
	for _, f := range r.Figures {
		line := fmt.Sprintf("%-*s %10s %10s %10s", name, f.Name, plain3(f.Median()), plain3(slices.Min(f.Values)), plain3(slices.Max(f.Values)))
		if f.Aim != "" {
			word, color := "reached", green
			if !f.Reached() {
				word, color = "missed", red
			}
			line += "  " + s.paint(color, word) + fmt.Sprintf(" (%s %s)", f.Aim, plain3(f.AimValue))
		}
		fmt.Fprintln(&b, line)
		for _, text := range wrap(f.Says, s.Width-2) {
			fmt.Fprintln(&b, s.paint(faint, "  "+text))
		}
	}
	fmt.Fprintln(&b)
	for _, set := range r.Settings {
		fmt.Fprintf(&b, "%-*s %s\n", name, set.Name, set.Value)
	}
	fmt.Fprintf(&b, "\n%d orders, %d %s, %.0f s\n", r.Orders, r.Repeat, plural(int64(r.Repeat), "repetition"), r.Took)
	_, err := io.WriteString(w, b.String())
	return err
}

// plain3 writes a number with three digits that count, and none behind the point from 100 on.
func plain3(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return "-"
	case a >= 100:
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}
