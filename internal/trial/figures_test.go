package trial

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"
)

func TestTheMedianOfAFigureIsTheMiddleOfItsValues(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{7}, 7},
		{[]float64{9, 1, 5}, 5},
		{[]float64{4, 1, 3, 2}, 2.5},
		{[]float64{100, 1, 1, 1, 1}, 1}, // one that was disturbed does not count
	} {
		f := Figure{Values: tc.values}
		before := append([]float64(nil), tc.values...)
		if got := f.Median(); got != tc.want {
			t.Errorf("median of %v is %v, want %v", tc.values, got, tc.want)
		}
		for i := range before {
			if f.Values[i] != before[i] {
				t.Errorf("the order of the repetitions is lost: %v, was %v", f.Values, before)
			}
		}
	}
	if !math.IsNaN((Figure{}).Median()) {
		t.Error("there is a median of nothing")
	}
}

func TestAnAimIsReachedByTheMedian(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		kind   string
		aim    float64
		values []float64
		want   bool
	}{
		{AtLeast, 5, []float64{4, 5, 6}, true},
		{AtLeast, 5, []float64{4, 4.9, 60}, false},
		{AtMost, 350, []float64{100, 350, 9000}, true},
		{AtMost, 350, []float64{100, 351, 351}, false},
		{"", 0, []float64{1}, true},
	} {
		if got := (Figure{Aim: tc.kind, AimValue: tc.aim, Values: tc.values}).Reached(); got != tc.want {
			t.Errorf("%s %v with %v: %t, want %t", tc.kind, tc.aim, tc.values, got, tc.want)
		}
	}
}

func sampleReport() BenchReport {
	r := BenchReport{Bench: "burst", StartedAt: time.Date(2026, 11, 30, 15, 0, 0, 0, time.UTC), Took: 12.5, Repeat: 2, Orders: 100, Settings: []Setting{{"mysql sync_binlog", "1"}}}
	for _, v := range []float64{6, 8} {
		r.add("one_by_one_ratio", "against one by one", v).aim(AtLeast, 5)
		r.add("consume_peak_mb", "peak", 40*v).aim(AtMost, 150)
		r.add("orders_per_second", "rate", 1000*v)
	}
	return r
}

func TestABenchIsOneJSONObjectWithEveryFigureUnderItsName(t *testing.T) {
	t.Parallel()
	text, err := json.Marshal(sampleReport())
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Bench   string
		Repeat  int
		Ratio   float64 `json:"one_by_one_ratio"`
		Peak    float64 `json:"consume_peak_mb"`
		Rate    float64 `json:"orders_per_second"`
		Figures map[string]struct {
			Says             string
			Median, Min, Max float64
			Values           []float64
			Aim              string
			Reached          *bool
		}
		Settings map[string]string
	}
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	if got.Bench != "burst" || got.Repeat != 2 || got.Ratio != 7 || got.Peak != 280 || got.Rate != 7000 || got.Settings["mysql sync_binlog"] != "1" {
		t.Errorf("%s", text)
	}
	f := got.Figures["one_by_one_ratio"]
	if f.Median != 7 || f.Min != 6 || f.Max != 8 || len(f.Values) != 2 || f.Aim != "at least 5.00" || f.Reached == nil || !*f.Reached {
		t.Errorf("%+v", f)
	}
	if f := got.Figures["consume_peak_mb"]; f.Reached == nil || *f.Reached {
		t.Errorf("an aim that was missed: %+v", f)
	}
	if f := got.Figures["orders_per_second"]; f.Reached != nil {
		t.Errorf("a figure without an aim has one: %+v", f)
	}
}

func TestABenchIsPrintedWithItsAimsAndTheServersSettings(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	if err := sampleReport().Print(&b, Style{Width: 80}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"one_by_one_ratio", "7.00", "reached (at least 5.00)", "missed (at most 150)", "mysql sync_binlog", "100 orders, 2 repetitions, 12 s"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
	for _, line := range strings.Split(b.String(), "\n") {
		if strings.Contains(line, "\x1b") {
			t.Errorf("colours where there are none: %q", line)
		}
	}
}
