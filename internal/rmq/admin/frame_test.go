package admin

import (
	"bytes"
	"encoding/hex"
	"io"
	"reflect"
	"strings"
	"testing"
)

func TestFrameSurvivesTheRoundTrip(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]*command{
		"fields and body": {Code: 17, Language: "GO", Opaque: 7, ExtFields: map[string]string{"topic": "order-timeout"}, Encoding: "JSON", Body: []byte("body\x00")},
		"nothing":         {Encoding: "JSON"},
		"refusal":         {Code: 1, Flag: responseFlag, Remark: "no", Encoding: "JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			frame, err := want.encode()
			if err != nil {
				t.Fatal(err)
			}
			// Two frames behind one another: reading the first must leave the second alone.
			r := bytes.NewReader(append(bytes.Clone(frame), frame...))
			for range 2 {
				got, err := readCommand(r)
				if err != nil {
					t.Fatal(err)
				}
				if !reflect.DeepEqual(got, want) {
					t.Errorf("got %+v, want %+v", got, want)
				}
			}
			if r.Len() != 0 {
				t.Errorf("%d bytes left", r.Len())
			}
		})
	}
}

// The bytes are what the protocol says; a round trip alone would not notice if both directions were wrong.
func TestFrameBytesAreTheProtocols(t *testing.T) {
	t.Parallel()
	frame, err := (&command{Code: 26, Language: "GO", Opaque: 3, Encoding: "JSON", Body: []byte{0xab}}).encode()
	if err != nil {
		t.Fatal(err)
	}
	header := `{"code":26,"language":"GO","version":0,"opaque":3,"flag":0,"serializeTypeCurrentRPC":"JSON"}`
	want := "00000061" + "0000005c" + hex.EncodeToString([]byte(header)) + "ab"
	if got := hex.EncodeToString(frame); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestFrameThatIsNotRocketMQIsRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ bytes, want string }{
		"text":                    {"HTTP/1.1 400 Bad Request", "is this a RocketMQ remoting port?"},
		"longer than any answer":  {"\x7f\xff\xff\xff\x00\x00\x00\x02", "is this a RocketMQ remoting port?"},
		"shorter than its header": {"\x00\x00\x00\x06\x00\x00\x00\x09{}", "header of 9 bytes in a frame of 6"},
		"no room for a header":    {"\x00\x00\x00\x03\x00\x00\x00\x00", "length 3"},
		"binary header":           {"\x00\x00\x00\x06\x01\x00\x00\x02{}", "header encoding 1"},
		"not JSON":                {"\x00\x00\x00\x06\x00\x00\x00\x02{[", "header:"},
		"cut in the prefix":       {"\x00\x00", io.ErrUnexpectedEOF.Error()},
		"cut in the header":       {"\x00\x00\x00\x06\x00\x00\x00\x02{", io.ErrUnexpectedEOF.Error()},
		"nothing":                 {"", io.EOF.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := readCommand(strings.NewReader(c.bytes))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %+v, %v, want an error with %q", got, err, c.want)
			}
		})
	}
}

func TestRequestThatIsTooLongIsNotSent(t *testing.T) {
	t.Parallel()
	if _, err := (&command{Body: make([]byte, maxFrame)}).encode(); err == nil {
		t.Error("no error")
	}
}

func FuzzReadCommand(f *testing.F) {
	frame, err := (&command{Code: 1, ExtFields: map[string]string{"a": "b"}, Encoding: "JSON", Body: []byte("x")}).encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(frame)
	f.Add([]byte("\x00\x00\x00\x06\x00\x00\x00\x02{}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := readCommand(bytes.NewReader(data))
		if err != nil {
			return
		}
		// What could be read can be written, and means the same.
		again, err := c.encode()
		if err != nil {
			t.Fatal(err)
		}
		d, err := readCommand(bytes.NewReader(again))
		if err != nil {
			t.Fatal(err)
		}
		if len(c.ExtFields) == 0 {
			c.ExtFields = nil // an empty map is not written
		}
		if !reflect.DeepEqual(c, d) {
			t.Errorf("got %+v, want %+v", d, c)
		}
	})
}
