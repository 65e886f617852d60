// Powers for a Vector.
#pragma once

namespace equipoise {

// e^x: within two units in the last place from -87 to 88; beyond, as at the end. NaN stays NaN,
// since greatest and least give their argument where it is one.
template <class Vector>
Vector exponential(Vector x) {
  x = Vector::all(88.0f).least(Vector::all(-87.0f).greatest(x));
  const Vector power = (x * Vector::all(1.44269504f)).rounded();
  // x - power * ln 2, with ln 2 in two parts, of which the first one has few digits.
  Vector rest = power.times_plus(Vector::all(-0.693359375f), x);
  rest = power.times_plus(Vector::all(2.12194440e-4f), rest);
  // Taylor's series: rest is at most ln 2 / 2.
  Vector value = Vector::all(1.0f / 5040);
  value = value.times_plus(rest, Vector::all(1.0f / 720));
  value = value.times_plus(rest, Vector::all(1.0f / 120));
  value = value.times_plus(rest, Vector::all(1.0f / 24));
  value = value.times_plus(rest, Vector::all(1.0f / 6));
  value = value.times_plus(rest, Vector::all(0.5f));
  value = value.times_plus(rest, Vector::all(1.0f));
  value = value.times_plus(rest, Vector::all(1.0f));
  return value.scaled(power);
}

// 2^x, to 3e-6: enough for what is rounded to bfloat16. For exponents that float32 has, or that `scaled` takes.
template <class Vector>
Vector power_of_two(Vector x) {
  const Vector whole = x.rounded(), rest = x - whole;
  Vector value = Vector::all(0.00958285271f);
  value = value.times_plus(rest, Vector::all(0.0559064247f));
  value = value.times_plus(rest, Vector::all(0.240240986f));
  value = value.times_plus(rest, Vector::all(0.693124193f));
  value = value.times_plus(rest, Vector::all(1));
  return value.scaled(whole);
}

}  // namespace equipoise
